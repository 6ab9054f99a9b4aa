// The outputs of a model as bars, tables, lines and pictures.
import { encodedSound, isRate, Player, soundOf, SoundView } from "./audio.js";
import { headsOf } from "./detect.js";
import { Detections } from "./detections.js";
import { Guarded, html, useMemo, useState } from "./html.js";
import { encodedPicture, Picture, picturesOf } from "./images.js";
import { Heat, heatOf, Mask, maskOf } from "./masks.js";
import { format, Plot } from "./plot.js";
import { classesOf, scoresOf } from "./reading.js";
import { Save } from "./save.js";
import { Classes, Scores } from "./scores.js";
import { rowsOf, show, size } from "./tensors.js";

const MIN_PLOTTED = 3;
const MIN_CURVE = 8; // elements of a vector that is a line at first
const MAX_SERIES = 6;
const MAX_DIGITS = 4; // numbers that are large on the page
const DEFAULT_RATE = 16_000; // samples a second of a sound
const MIN_SIDE = 2;
const MAX_RATIO = 16; // of the sides of a picture
const MIN_MATRIX = 8; // rows and columns of a table that may be a picture
const MAX_LISTED = 1000;
const MAX_ENCODED = 16;

// A single row is listed from top to bottom, since it would be wider than the page. Rows are counted from `first`.
function Table({ tensor, rows, names, first }) {
  const isRow = rows.length === 1 && rows[0].length > 1;
  const lines = isRow ? rows[0].slice(0, MAX_LISTED).map((v, i) => [names ? names[i] : i, [v]]) : rows.map((row, i) => [i + first, row]);
  const isFew = lines.length * lines[0]?.[1].length <= MAX_DIGITS;
  return html`<div class="scroll short" tabindex="0" role="region" aria-label=${`Values of ${tensor.name}`}>
      <table class=${isFew ? "values few" : "values"}>
        ${names && !isRow && html`<thead><tr><td></td>${names.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>`}
        <tbody>${lines.map(([label, row]) => html`<tr>${lines.length > 1 && html`<th scope="row">${label}</th>`}${row.map((v) => html`<td>${show(v)}</td>`)}</tr>`)}</tbody></table></div>
    ${lines.length < (isRow ? tensor.shape[1] : tensor.shape[0] ?? 1) && html`<p class="note">The first ${lines.length} of ${isRow ? `${tensor.shape[1]} values` : `${tensor.shape[0]} rows`}.</p>`}
    ${!isFew && html`<${Save} tensor=${tensor} header=${names} />`}`;
}

function List({ tensor, flat }) {
  return html`<pre class="scroll short" tabindex="0" role="region" aria-label=${`Values of ${tensor.name}`}>${
    flat.slice(0, MAX_LISTED).map(show).join(" ")}${flat.length > MAX_LISTED ? " …" : ""}</pre><${Save} tensor=${tensor} />`;
}

// Lines over the longer axis.
function Lines({ tensor, rows }) {
  const isAcross = rows.length < rows[0].length;
  const series = isAcross ? rows : rows[0].map((_, k) => rows.map((r) => r[k]));
  const label = (k) => (series.length > 1 ? `${tensor.name}[${isAcross ? `${k}, :` : k}]` : "");
  return html`<${Plot} title=${tensor.name} hasTable=${false} x=${series[0].map((_, i) => i)}
    series=${series.map((values, k) => ({ label: label(k), values }))} />`;
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

// The ways to show a tensor by their names, the best one first. `context`: the names of its classes, its declared shape
// and whether a photo was sent.
function viewsOf(tensor, context) {
  const rows = rowsOf(tensor);
  const flat = tensor.data?.flat(Infinity) ?? [];
  const isNumeric = flat.length > 0 && flat.every((v) => typeof v === "number" || v === null);
  const scores = isNumeric ? scoresOf(tensor, context) : null;
  const names = scores && context.names?.length === scores.rows[0].length ? context.names : null;
  const found = [rows
    ? ["Table", html`<${Table} tensor=${tensor} rows=${rows} names=${names} first=${isVector(tensor, context) ? 0 : 1} />`]
    : ["Values", html`<${List} tensor=${tensor} flat=${flat} />`]];
  if (isNumeric && rows && (rows.length >= MIN_PLOTTED || rows[0]?.length >= MIN_CURVE)) {
    const lines = ["Line", html`<${Lines} tensor=${tensor} rows=${rows} />`];
    // The elements of a vector have an order; rows are independent items unless the reader knows better.
    if (isVector(tensor, context) && flat.length >= MIN_CURVE) found.unshift(lines);
    else if (Math.min(rows.length, rows[0].length) <= MAX_SERIES) found.push(lines);
  }
  const pictures = isNumeric ? picturesOf(tensor) : [];
  const side = tensor.shape.length > 2 ? MIN_SIDE : MIN_MATRIX;
  const [short, long] = pictures.length > 0 ? [pictures[0].width, pictures[0].height].sort((a, b) => a - b) : [0, 0];
  if (short >= side && long <= MAX_RATIO * short) {
    const view = ["Picture", html`<${Pictures} tensor=${tensor} pictures=${pictures} />`];
    if (tensor.shape.length > 2) found.unshift(view);
    else found.push(view);
  }
  const urls = tensor.datatype === "BYTES" ? flat.slice(0, MAX_ENCODED).map(encodedPicture) : [];
  if (urls.length > 0 && urls.every(Boolean)) found.unshift(["Picture", html`<${Encoded} tensor=${tensor} urls=${urls} />`]);
  const sounds = tensor.datatype === "BYTES" ? flat.slice(0, MAX_ENCODED).map(encodedSound) : [];
  if (sounds.length > 0 && sounds.every(Boolean)) {
    found.unshift(["Sound", html`${sounds.map((blob, i) => html`<${Player} blob=${blob} label=${`Play sound ${i + 1} of ${tensor.name}`} />`)}`]);
  }
  const sound = isNumeric ? soundOf(tensor, context.kind) : null;
  if (sound) {
    const view = ["Sound", html`<${SoundView} title=${tensor.name} samples=${sound.samples} rate=${context.rate} />`];
    if (sound.isCertain) found.unshift(view);
    else found.push(view);
  }
  if (scores) {
    const view = ["Bars", html`<${Scores} scores=${scores} names=${names} />`];
    if (scores.isCertain) found.unshift(view);
    else found.push(view);
  }
  const [picture] = context.sent;
  const isArea = tensor.shape.length > 2 || picture;
  const mask = isArea && !urls.length && flat.length > 0 ? maskOf(tensor, picture, context.isLabelled ? context.names : null) : null;
  const heat = isArea && isNumeric ? heatOf(tensor, picture) : null;
  const put = (view, isFirst) => (isFirst ? found.unshift(view) : found.push(view));
  if (heat) put(["Heat map", html`<${Heat} title=${tensor.name} heat=${heat} sent=${context.sent} />`], picture && !context.isGreySent && !mask);
  if (mask) put(["Mask", html`<${Mask} title=${tensor.name} mask=${mask} sent=${context.sent} names=${context.names} />`], mask.isCertain);
  const classes = classesOf(tensor, context);
  if (classes) found.unshift(["Class", html`<${Classes} names=${classes} values=${flat} />`]);
  return found;
}

// Whether a tensor is one vector, not a row for each item of a batch.
function isVector({ shape }, { declared }) {
  if (shape.length === 1) return !declared || declared.length !== 1 || declared[0] >= 0;
  return shape.length === 2 && shape[0] === 1 && shape[1] > 1;
}

// What the metadata and the model say of an output.
function contextOf(tensor, model, sent, rate) {
  const labels = model.labels ?? {};
  const lists = Object.values(labels);
  return {
    names: labels[tensor.name] ?? (lists.length === 1 ? lists[0] : null),
    isLabelled: Boolean(labels[tensor.name]),
    declared: model.metadata?.outputs?.find(({ name }) => name === tensor.name)?.shape,
    hasPhoto: sent.length > 0,
    sent,
    kind: model.kind,
    rate,
    isGreySent: sent.length > 0 && sent[0].isGrey,
  };
}

function Output({ tensor, context }) {
  const views = useMemo(() => viewsOf(tensor, context), [tensor]);
  const [chosen, setChosen] = useState(views[0][0]);
  const [name, view] = views.find(([each]) => each === chosen) ?? views[0];
  return html`<section class="output" aria-label=${`Output ${tensor.name}`}>
    <div class="row"><h2><code>${tensor.name}</code> <small>${tensor.datatype} [${tensor.shape.join(", ")}]</small></h2>
      ${views.length > 1 && views.map(([each]) => html`<button class="small" aria-pressed=${each === name} onClick=${() => setChosen(each)}>${each}</button>`)}
    </div>${view}</section>`;
}

// All outputs of an answer. `sent`: the pictures that were sent.
// `rate`: that of a sound that was sent.
export function Outputs({ outputs, model, sent = [], rate = DEFAULT_RATE }) {
  const own = Number(outputs.find(isRate)?.data?.flat(Infinity)[0]);
  const names = Object.values(model.labels ?? {})[0] ?? null;
  const heads = useMemo(() => (sent.length > 0 ? headsOf(outputs, sent[0], names) : []), [outputs]);
  return html`${heads.length > 0 && html`<${Guarded}><${Detections} heads=${heads} sent=${sent} names=${names} /></${Guarded}>`}
    ${outputs.filter(({ name }) => !(heads[0]?.isCertain && heads[0].prototypes?.name === name)).map((tensor) => html`<${Guarded} key=${tensor.name}><${Output} tensor=${tensor} context=${contextOf(tensor, model, sent, own > 0 ? own : rate)} /></${Guarded}>`)}`;
}
