// Numbers with bars beside them: to the right for positive ones, to the left for negative ones.
import { html } from "./html.js";
import { format } from "./plot.js";

const WIDTH = 100;

function Bar({ value, most, hasNegative }) {
  const zero = hasNegative ? WIDTH / 2 : 0;
  const width = ((WIDTH - zero) * Math.abs(value)) / most;
  return html`<svg class="bar" viewBox=${`0 0 ${WIDTH} 10`} preserveAspectRatio="none" aria-hidden="true">
    <rect class=${value < 0 ? "negative" : ""} x=${value < 0 ? zero - width : zero} y="1" width=${width} height="8" />
    <path d=${`M${zero} 0 V10`} /></svg>`;
}

// `values` with their labels; `others`: values to compare with, in a column of their own.
export function Bars({ title, values, labels, others = null, othersTitle = "" }) {
  const known = values.filter(Number.isFinite);
  const most = known.reduce((a, v) => Math.max(a, Math.abs(v)), 1e-300);
  const hasNegative = known.some((v) => v < 0);
  return html`<table class="bars"><caption>${title}</caption>
    ${others && html`<thead><tr><td></td><th scope="col" class="number">model</th><td></td><th scope="col" class="number">${othersTitle}</th></tr></thead>`}
    <tbody>${values.map((v, i) => html`<tr><th scope="row">${labels[i]}</th><td class="number">${format(v)}</td>
      <td>${known.length > 1 && Number.isFinite(v) && html`<${Bar} value=${v} most=${most} hasNegative=${hasNegative} />`}</td>
      ${others && html`<td class="number">${i < others.length ? format(others[i]) : "–"}</td>`}</tr>`)}</tbody></table>`;
}
