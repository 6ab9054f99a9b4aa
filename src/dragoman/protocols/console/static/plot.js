// Line charts by uPlot, with a summary and a table of the values for readers who do not see the picture.
import { html, useEffect, useRef, useState } from "./html.js";

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4]; // between ticks of an index
const COLORS = ["#1a6fd4", "#c2410c", "#15803d", "#7e22ce", "#b91c1c", "#0e7490"];

// `series`: [{ label, values }], each as long as `x`. With `time`, x are seconds since 1970. Without `hasTable` the page
// shows the values elsewhere.
export function Plot({ title, x, series, time = false, unit = "", xLabel = "index", hasTable = true }) {
  const holder = useRef(null);
  const [isTable, setIsTable] = useState(false);
  useEffect(() => {
    if (isTable) return undefined;
    const style = getComputedStyle(document.body);
    const axis = { stroke: style.color, grid: { stroke: style.getPropertyValue("--line"), width: 1 }, ticks: { show: false } };
    const options = {
      width: holder.current.clientWidth || 400,
      height: 180,
      scales: { x: { time } },
      axes: [{ ...axis, ...(x.every(Number.isInteger) && !time ? { incrs: WHOLE } : {}) }, { ...axis, size: 64 }],
      legend: { show: series.length > 1 },
      series: [{}, ...series.map((s, i) => ({ label: s.label, stroke: COLORS[i % COLORS.length], width: 2 }))],
    };
    const chart = new globalThis.uPlot(options, [x, ...series.map((s) => s.values)], holder.current);
    return () => chart.destroy();
  });
  const last = (values) => values.findLast((value) => value !== null && value !== undefined);
  const summary = series.map((s) => `${s.label || title}: ${format(last(s.values))} ${unit}`).join(", ");
  return html`<figure class="card plot">
    <figcaption>${title} <output>${summary}</output>
      ${hasTable && html`<button class="small" aria-pressed=${isTable} onClick=${() => setIsTable(!isTable)}>Table</button>`}
    </figcaption>
    ${isTable
      ? html`<div class="scroll short"><table><thead><tr><th scope="col">${time ? "time" : xLabel}</th>
          ${series.map((s) => html`<th scope="col">${s.label || title}</th>`)}</tr></thead>
          <tbody>${x.map((at, i) => html`<tr><td>${time ? new Date(at * 1000).toLocaleTimeString() : at}</td>
            ${series.map((s) => html`<td>${format(s.values[i])}</td>`)}</tr>`)}</tbody></table></div>`
      : html`<div ref=${holder} role="img" aria-label=${`${title}. ${summary}`}></div>`}
  </figure>`;
}

export function format(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number" || Number.isInteger(value)) return String(value);
  return Math.abs(value) >= 100 ? value.toFixed(0) : value.toPrecision(3);
}
