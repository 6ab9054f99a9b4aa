// The outputs of a model as tables, plots and pictures.
import { html, useMemo, useState } from "./html.js";
import { encodedPicture, Picture, picturesOf } from "./images.js";
import { format, Plot } from "./plot.js";
import { rowsOf, show, size } from "./tensors.js";

const MIN_PLOTTED = 3;
const MIN_CURVE = 8; // rows of what is plotted at first
const MAX_SERIES = 6;
const MIN_SIDE = 2;
const MAX_LISTED = 1000;
const MAX_ENCODED = 16;

function Table({ tensor, rows }) {
  const isCut = rows.length * (rows[0]?.length ?? 1) < size(tensor.shape);
  return html`<div class="scroll short" tabindex="0" role="region" aria-label=${`Values of ${tensor.name}`}>
      <table><tbody>${rows.map(
        (row, i) => html`<tr><th scope="row">${i}</th>${row.map((v) => html`<td>${show(v)}</td>`)}</tr>`,
      )}</tbody></table></div>
    ${isCut && html`<p class="note">The first ${rows.length} of ${tensor.shape[0]} rows.</p>`}`;
}

function List({ tensor, flat }) {
  return html`<pre class="scroll short" tabindex="0" role="region" aria-label=${`Values of ${tensor.name}`}>${
    flat.slice(0, MAX_LISTED).map(show).join(" ")}${flat.length > MAX_LISTED ? " …" : ""}</pre>`;
}

function Lines({ tensor, rows }) {
  const label = (k) => (rows[0].length > 1 ? `${tensor.name}[${k}]` : "");
  return html`<${Plot} title=${tensor.name} hasTable=${false} x=${rows.map((_, i) => i)}
    series=${rows[0].map((_, k) => ({ label: label(k), values: rows.map((r) => r[k]) }))} />`;
}

function Pictures({ tensor, pictures }) {
  const [{ range }] = pictures;
  return html`<div class="row">${pictures.map((picture, i) => html`<${Picture} key=${i} picture=${picture}
      label=${`Picture ${i + 1} of ${tensor.name}, ${picture.width} x ${picture.height}`} />`)}</div>
    <p class="note">${format(range[0])} is black, ${format(range[1])} is white.
      ${tensor.shape.length === 4 && tensor.shape[0] > pictures.length && ` The first ${pictures.length} of ${tensor.shape[0]} pictures.`}</p>`;
}

function Encoded({ tensor, urls }) {
  return html`<div class="row">${urls.map((url, i) => html`<img class="picture" src=${url} alt=${`Picture ${i + 1} of ${tensor.name}`} />`)}</div>
    ${size(tensor.shape) > urls.length && html`<p class="note">The first ${urls.length} of ${size(tensor.shape)} pictures.</p>`}`;
}

// The ways to show a tensor by their names, the best one first.
function viewsOf(tensor) {
  const rows = rowsOf(tensor);
  const flat = tensor.data?.flat(Infinity) ?? [];
  const isNumeric = flat.length > 0 && flat.every((v) => typeof v === "number" || v === null);
  const values = rows
    ? ["Table", html`<${Table} tensor=${tensor} rows=${rows} />`]
    : ["Values", html`<${List} tensor=${tensor} flat=${flat} />`];
  const found = [values];
  if (isNumeric && rows && rows.length >= MIN_PLOTTED && rows[0].length <= MAX_SERIES) {
    const plot = ["Plot", html`<${Lines} tensor=${tensor} rows=${rows} />`];
    if (rows.length >= MIN_CURVE) found.unshift(plot);
    else found.push(plot);
  }
  const pictures = isNumeric ? picturesOf(tensor) : [];
  if (pictures.length > 0 && Math.min(pictures[0].width, pictures[0].height) >= MIN_SIDE) {
    const view = ["Picture", html`<${Pictures} tensor=${tensor} pictures=${pictures} />`];
    if (tensor.shape.length > 2) found.unshift(view);
    else found.push(view);
  }
  const urls = tensor.datatype === "BYTES" ? flat.slice(0, MAX_ENCODED).map(encodedPicture) : [];
  if (urls.length > 0 && urls.every(Boolean)) found.unshift(["Picture", html`<${Encoded} tensor=${tensor} urls=${urls} />`]);
  return found;
}

export function Output({ tensor }) {
  const views = useMemo(() => viewsOf(tensor), [tensor]);
  const [chosen, setChosen] = useState(views[0][0]);
  const [name, view] = views.find(([each]) => each === chosen) ?? views[0];
  return html`<section class="output" aria-label=${`Output ${tensor.name}`}>
    <div class="row"><h2><code>${tensor.name}</code> <small>${tensor.datatype} [${tensor.shape.join(", ")}]</small></h2>
      ${views.length > 1 && views.map(([each]) => html`<button class="small" aria-pressed=${each === name} onClick=${() => setChosen(each)}>${each}</button>`)}
    </div>${view}</section>`;
}
