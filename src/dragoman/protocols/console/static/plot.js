// Line charts by uPlot, with a summary and a table of the values for readers who do not see the picture.
import { html, useEffect, useRef, useState } from "./html.js";

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4]; // between ticks of an index
const FEW = 6; // points that are marked
const COLORS = ["#1a6fd4", "#c2410c", "#15803d", "#7e22ce", "#b91c1c", "#0e7490"];
const DARK_COLORS = ["#79b0ff", "#ffa066", "#5fd38d", "#cfa0ff", "#ff8f8f", "#5fd0e0"];

// The first sample of a series in time stands at the end of half a minute, and the axis shows seconds.
const SHORTEST_S = 30;
const timeRange = ({ data: [x] }) => [Math.min(x[0], x.at(-1) - SHORTEST_S), x.at(-1)];
const indexRange = (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]);

// An axis of equal values still has a scale.
const yRange = (_, low, high) => (low === high ? [Math.min(0, low), high > 0 ? high * 1.2 : 1] : globalThis.uPlot.rangeNum(low, high, 0.1, true));

function optionsOf(x, series, isTime, width) {
  const style = getComputedStyle(document.body);
  const axis = { stroke: style.color, grid: { stroke: style.getPropertyValue("--line"), width: 1 }, ticks: { show: false } };
  const isIndex = !isTime && x.every(Number.isInteger);
  return {
    width,
    height: isTime ? 180 : 165,
    scales: { x: { time: isTime, range: isTime ? timeRange : indexRange }, y: { range: yRange } },
    axes: [{ ...axis, ...(isIndex ? { incrs: WHOLE } : {}), ...(isTime ? {} : { size: 32 }) }, { ...axis, size: 64 }],
    legend: { show: false },
    cursor: { show: false },
    series: [{}, ...series.map((s, i) => ({ label: s.label, stroke: colorOf(i), width: 2, points: { show: x.length <= FEW } }))],
  };
}

const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
const colorOf = (i) => (isDark() ? DARK_COLORS : COLORS)[i % COLORS.length];
const known = (values) => values.filter((value) => value !== null && value !== undefined);

// What a reader who does not see the picture has to know: the last value of a time series, else the range.
function summaryOf(values, isTime, unit) {
  const found = known(values);
  if (found.length === 0) return "no values yet";
  const text = isTime ? format(found.at(-1)) : `${format(Math.min(...found))} to ${format(Math.max(...found))}`;
  return `${text} ${unit}`.trim();
}

// `series`: [{ label, values }], each as long as `x`. With `time`, x are seconds since 1970. Without `hasTable` the page
// shows the values elsewhere.
export function Plot({ title, x, series, time = false, unit = "", xLabel = "index", hasTable = true }) {
  const holder = useRef(null);
  const [isTable, setIsTable] = useState(false);
  useEffect(() => {
    if (isTable) return undefined;
    const options = optionsOf(x, series, time, holder.current.clientWidth || 400);
    const chart = new globalThis.uPlot(options, [x, ...series.map((s) => s.values)], holder.current);
    const observer = new ResizeObserver(([{ contentRect: { width } }]) => width > 0 && chart.setSize({ width, height: options.height }));
    observer.observe(holder.current);
    return () => (observer.disconnect(), chart.destroy());
  });
  const summaries = series.map((s) => [s.label, summaryOf(s.values, time, unit)]);
  const isEmpty = series.every((s) => known(s.values).length === 0);
  const text = summaries.map(([label, summary]) => (label ? `${label}: ${summary}` : summary)).join(", ");
  return html`<figure class="card plot">
    <figcaption><b>${title}</b> <span class="series">${summaries.map(([label, summary], i) => html`<span>
        <svg class="swatch" viewBox="0 0 12 12" aria-hidden="true"><rect width="12" height="4" y="4" fill=${colorOf(i)} /></svg> ${label} ${!isEmpty && summary}</span>`)} ${isEmpty && "no values yet"}</span>
      ${hasTable && html`<button class="small" aria-pressed=${isTable} aria-label=${`Table of ${title}`} onClick=${() => setIsTable(!isTable)}>Table</button>`}
    </figcaption>
    ${isTable
      ? html`<div class="scroll short" tabindex="0" role="region" aria-label=${`Values of ${title}`}><table><thead><tr><th scope="col">${time ? "time" : xLabel}</th>
          ${series.map((s) => html`<th scope="col">${s.label || title}</th>`)}</tr></thead>
          <tbody>${x.map((at, i) => html`<tr><td>${time ? new Date(at * 1000).toLocaleTimeString() : format(at)}</td>
            ${series.map((s) => html`<td>${format(s.values[i])}</td>`)}</tr>`)}</tbody></table></div>`
      : html`<div ref=${holder} role="img" aria-label=${`${title}. ${text}`}></div>`}
  </figure>`;
}

export function format(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number" || Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  return size >= 100 ? value.toFixed(0) : value.toPrecision(3);
}
