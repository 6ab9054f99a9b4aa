// Line charts, with a summary and a table of the values for readers who do not see the picture.
import { ticks } from "./grid.js";
import { html, useEffect, useRef, useState } from "./html.js";

const FEW = 6; // points that are marked
const MAX_POINTS = 2000; // of a line: more are drawn as least and greatest of their neighbours
const COLORS = ["#1a6fd4", "#c2410c", "#15803d", "#7e22ce", "#b91c1c", "#0e7490"];
const DARK_COLORS = ["#79b0ff", "#ffa066", "#5fd38d", "#cfa0ff", "#ff8f8f", "#5fd0e0"];
const [LEFT, RIGHT, TOP, BOTTOM] = [58, 8, 8, 24];
const TICK_PX = 80; // between ticks across

// The first sample of a series in time stands at the end of half a minute, and the axis shows seconds.
const SHORTEST_S = 30;
const TIME_STEPS = [5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600];
export const timeRange = (x) => [Math.min(x[0], x.at(-1) - SHORTEST_S), x.at(-1)];

const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
const colorOf = (i) => (isDark() ? DARK_COLORS : COLORS)[i % COLORS.length];
const isKnown = (value) => Number.isFinite(value);

// An axis of equal values still has a scale; with `fromZero` it begins at 0.
function yRange(values, fromZero = false) {
  const [low, high] = values.reduce(([a, b], v) => (isKnown(v) ? [Math.min(a, v), Math.max(b, v)] : [a, b]), [Infinity, -Infinity]);
  if (!isKnown(low)) return [0, 1];
  if (fromZero && low >= 0) return [0, high > 0 ? high * 1.06 : 1];
  if (low === high) return [Math.min(0, low), high > 0 ? high * 1.2 : 1];
  const margin = 0.06 * (high - low);
  return [low >= 0 && low <= margin ? 0 : low - margin, high <= 0 && -high <= margin ? 0 : high + margin];
}

function timeTicks([low, high], count) {
  const step = TIME_STEPS.find((s) => (high - low) / s <= count) ?? TIME_STEPS.at(-1);
  const first = Math.ceil(low / step) * step;
  return Array.from({ length: Math.floor((high - first) / step) + 1 }, (_, i) => first + i * step);
}

const clock = (s) => new Date(s * 1000).toLocaleTimeString([], { hour12: false });
const tickText = (v) => (v !== 0 && (Math.abs(v) >= 1e6 || Math.abs(v) < 1e-4) ? v.toExponential() : String(v));

// The indices that are drawn: all, or the least and the greatest value of each group of neighbours.
export function thinned(values, most = MAX_POINTS) {
  if (values.length <= most) return values.map((_, i) => i);
  const size = Math.ceil((2 * values.length) / most);
  const found = [];
  for (let from = 0; from < values.length; from += size) {
    let [low, high] = [from, from];
    for (let i = from; i < Math.min(values.length, from + size); i++) {
      if (!(values[i] >= values[low])) low = i;
      if (!(values[i] <= values[high])) high = i;
    }
    found.push(...(low === high ? [low] : [Math.min(low, high), Math.max(low, high)]));
  }
  return found;
}

// A line with gaps where values are missing.
function pathOf(x, values, place) {
  let isOpen = false;
  return thinned(values).map((i) => {
    const text = isKnown(values[i]) ? `${isOpen ? "L" : "M"}${place(x[i], values[i])}` : "";
    isOpen = text !== "";
    return text;
  }).join("");
}

function Chart({ x, series, time, width, height }) {
  const [left, right] = time ? timeRange(x) : x.length > 1 ? [x[0], x.at(-1)] : [x[0] - 1, x[0] + 1];
  const [low, high] = yRange(series.flatMap((s) => s.values), time);
  const across = (v) => LEFT + ((width - LEFT - RIGHT) * (v - left)) / (right - left || 1);
  const up = (v) => height - BOTTOM - ((height - TOP - BOTTOM) * (v - low)) / (high - low);
  const place = (a, b) => `${across(a).toFixed(1)} ${up(b).toFixed(1)}`;
  const count = Math.max(2, Math.floor((width - LEFT) / TICK_PX));
  const isIndex = !time && x.every(Number.isInteger);
  const columns = time ? timeTicks([left, right], count) : ticks(left, right, count).filter((v) => !isIndex || Number.isInteger(v));
  return html`<svg viewBox=${`0 0 ${width} ${height}`} width=${width} height=${height} aria-hidden="true">
    ${ticks(low, high, 4).map((v) => html`<path class="grid" d=${`M${LEFT} ${up(v)}H${width - RIGHT}`} /><text x=${LEFT - 6} y=${up(v) + 4} text-anchor="end">${tickText(v)}</text>`)}
    ${columns.map((v) => html`<path class="grid" d=${`M${across(v)} ${TOP}V${height - BOTTOM}`} /><text x=${across(v)} y=${height - 7} text-anchor=${across(v) > width - TICK_PX / 3 ? "end" : "middle"}>${time ? clock(v) : tickText(v)}</text>`)}
    ${series.map(({ values }, i) => html`<path class="line" stroke=${colorOf(i)} d=${pathOf(x, values, place)} />
      ${x.length <= FEW && values.map((v, k) => isKnown(v) && html`<circle cx=${across(x[k])} cy=${up(v)} r="3" fill=${colorOf(i)} />`)}`)}</svg>`;
}

const known = (values) => values.filter((value) => value !== null && value !== undefined);

// What a reader who does not see the picture has to know: the last value of a time series, else the range.
function summaryOf(values, isTime, unit) {
  const found = known(values);
  if (found.length === 0) return "no values yet";
  const [low, high] = found.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  const text = isTime ? format(found.at(-1)) : `${format(low)} to ${format(high)}`;
  return `${text} ${unit}`.trim();
}

// `series`: [{ label, values }], each as long as `x`. With `time`, x are seconds since 1970. Without `hasTable` the page
// shows the values elsewhere.
export function Plot({ title, x, series, time = false, unit = "", xLabel = "index", hasTable = true }) {
  const holder = useRef(null);
  const [isTable, setIsTable] = useState(false);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    if (isTable) return undefined;
    const observer = new ResizeObserver(([{ contentRect }]) => setWidth(Math.floor(contentRect.width)));
    observer.observe(holder.current);
    return () => observer.disconnect();
  }, [isTable]);
  const height = time ? 180 : 165;
  const summaries = series.map((s) => [s.label, summaryOf(s.values, time, unit)]);
  const isEmpty = series.every((s) => known(s.values).length === 0);
  const text = summaries.map(([label, summary]) => (label ? `${label}: ${summary}` : summary)).join(", ");
  return html`<figure class="card plot">
    <figcaption><b>${title}</b>${time && unit && html` <span class="unit">${unit}</span>`} <span class="series">${summaries.map(([label, summary], i) => html`<span>
        <svg class="swatch" viewBox="0 0 12 12" aria-hidden="true"><rect width="12" height="4" y="4" fill=${colorOf(i)} /></svg> ${label} ${!isEmpty && summary}</span>`)} ${isEmpty && "no values yet"}</span>
      ${hasTable && html`<button class="small" aria-pressed=${isTable} aria-label=${`Table of ${title}`} onClick=${() => setIsTable(!isTable)}>Table</button>`}
    </figcaption>
    ${isTable
      ? html`<div class="scroll short" tabindex="0" role="region" aria-label=${`Values of ${title}`}><table><thead><tr><th scope="col">${time ? "time" : xLabel}</th>
          ${series.map((s) => html`<th scope="col">${s.label || title}</th>`)}</tr></thead>
          <tbody>${x.map((at, i) => html`<tr><td>${time ? new Date(at * 1000).toLocaleTimeString() : format(at)}</td>
            ${series.map((s) => html`<td>${format(s.values[i])}</td>`)}</tr>`)}</tbody></table></div>`
      : html`<div ref=${holder} class="chart" role="img" aria-label=${`${title}. ${text}`} style=${{ height: `${height}px` }}>
          ${width > 0 && x.length > 0 && html`<${Chart} x=${x} series=${series} time=${time} width=${width} height=${height} />`}</div>`}
  </figure>`;
}

export function format(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number" || Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  return size >= 100 ? value.toFixed(0) : value.toPrecision(3);
}
