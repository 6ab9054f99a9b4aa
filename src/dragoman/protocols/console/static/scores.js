// Scores of classes as bars, the largest first; several rows as groups of bars.
import { html, useState } from "./html.js";
import { format } from "./plot.js";
import { percent, ranked, softmax } from "./reading.js";
import { show } from "./tensors.js";

const TOP = 5;
const GROUP_TOP = 3;
const MAX_FIXED = 6; // classes that keep their order in all groups
const MAX_GROUPS = 12;
const MAX_BARS = 1000;
const WIDTH = 100;

// A bar from zero, in a scale from `low` to `high` that includes zero.
function Track({ value, low, high }) {
  const x = (v) => (WIDTH * (v - low)) / (high - low || 1);
  return html`<svg class="track" viewBox=${`0 0 ${WIDTH} 10`} preserveAspectRatio="none" aria-hidden="true">
    ${Number.isFinite(value) && html`<rect class=${value < 0 ? "negative" : ""} x=${x(Math.min(0, value))} width=${Math.abs(x(value) - x(0))} height="10" />`}
    ${low < 0 && html`<path d=${`M${x(0)} 0 V10`} />`}</svg>`;
}

// The bars of some classes of a row, in the order of `shown`. `text` formats a value.
function Row({ caption, row, shown, names, text, range: [low, high], top }) {
  return html`<table class="scores">${caption && html`<caption>${caption}</caption>`}<tbody>${shown.map((i) => html`<tr class=${i === top ? "top" : ""} key=${i}>
      <th scope="row">${names ? names[i] : i}</th><td><${Track} value=${row[i]} low=${low} high=${high} /></td>
      <td class="number" title=${show(row[i])}>${text(row[i])}</td></tr>`)}</tbody></table>`;
}

function rangeOf(rows, areProbabilities) {
  if (areProbabilities) return [0, 1];
  const flat = rows.flat().filter(Number.isFinite);
  return [flat.reduce((a, b) => Math.min(a, b), 0), flat.reduce((a, b) => Math.max(a, b), 0)];
}

// `scores`: as `scoresOf` returns them.
export function Scores({ scores, names }) {
  const [showsAll, setShowsAll] = useState(false);
  const [isSoftmax, setIsSoftmax] = useState(false);
  const rows = isSoftmax ? scores.rows.map(softmax) : scores.rows;
  const areProbabilities = scores.isProbability || isSoftmax;
  const count = rows[0].length;
  const range = rangeOf(rows, areProbabilities);
  const text = areProbabilities ? percent : format;
  const isSingle = rows.length === 1;
  const limit = showsAll ? MAX_BARS : isSingle ? TOP : GROUP_TOP;
  const isFixed = !isSingle && count <= MAX_FIXED;
  const groups = rows.slice(0, showsAll ? MAX_BARS : MAX_GROUPS).map((row, i) => {
    const best = ranked(row, limit);
    return { row, best: best[0], shown: isFixed ? row.map((_, k) => k) : best, caption: isSingle ? "" : `row ${i + 1}` };
  });
  const isCut = (!isFixed && count > limit) || rows.length > groups.length;
  const what = isSingle ? `${count} classes` : `${rows.length} rows of ${count} classes`;
  return html`<div class=${isSingle ? "" : "groups"}>${groups.map(({ row, best, shown, caption }) => html`<${Row} key=${caption}
      caption=${caption} row=${row} shown=${shown} names=${names} text=${text} range=${range} top=${best} />`)}</div>
    <p class="row">
      ${(isCut || showsAll) && html`<button class="small" aria-pressed=${showsAll} onClick=${() => setShowsAll(!showsAll)}>${showsAll ? "Show the first" : `Show all ${what}`}</button>`}
      ${!scores.isProbability && html`<label class="inline"><input type="checkbox" checked=${isSoftmax}
        onChange=${(e) => setIsSoftmax(e.target.checked)} /> softmax of the values</label>`}
      ${isSoftmax && html`<span class="note">The model sent other numbers: see Table.</span>`}</p>`;
}

// The classes of a tensor of indices by their names.
export function Classes({ names, values }) {
  return html`<ul class="classes">${names.slice(0, MAX_BARS).map((name, i) => html`<li><b>${name}</b> <small>${show(values[i])}</small></li>`)}</ul>`;
}
