// The boxes of a detector on the photo that was sent.
import { Choice } from "./choice.js";
import { classColor, inkOn, rgbOf } from "./colors.js";
import { html, useMemo, useState } from "./html.js";
import { canvasOf, drawOnPhoto, Overlay } from "./overlay.js";
import { boxOnPhoto } from "./photos.js";
import { percent } from "./reading.js";

const THRESHOLD = 0.25;
const MAX_DRAWN = 200;
const MAX_NAMED = 25; // of more boxes the names would hide the photo
const OFF = "off";
const SEEN = 0.5; // the least score of a point
const ALPHA = 130; // of a mask
// Points of the poses of COCO that are joined.
const BONES = "0-1 0-2 1-3 2-4 5-6 5-7 7-9 6-8 8-10 5-11 6-12 11-12 11-13 13-15 12-14 14-16".split(" ").map((pair) => pair.split("-"));

const nameOf = (names, index) => names?.[index] ?? `class ${index}`;

function Box({ box, photo, name, isFaint, isNamed }) {
  const color = classColor(box.index);
  const share = (v, whole) => `${(100 * v) / whole}%`;
  const style = {
    left: share(box.x0, photo.width), top: share(box.y0, photo.height), borderColor: color,
    width: share(box.x1 - box.x0, photo.width), height: share(box.y1 - box.y0, photo.height),
  };
  const isHigh = box.y0 < photo.height * 0.06; // no room for the name above
  return html`<div class=${isFaint ? "box faint" : "box"} style=${style}>
    ${isNamed && html`<span class=${`${isHigh ? "inside" : ""} ${box.x0 > photo.width * 0.7 ? "left" : ""}`} style=${{ background: color, color: inkOn(color) }}>${name} ${percent(box.score)}</span>`}</div>`;
}

// The masks of boxes, the best above: where the sum of the prototypes, weighted by the numbers of the box, is positive.
function masksOf(boxes, { flat, shape: [, planes, height, width] }, n, sent) {
  const rgba = new Uint8ClampedArray(4 * width * height);
  const cell = (v, cells, size, round) => Math.min(cells, Math.max(0, round((v * cells) / size)));
  for (const { rest, index, sent: box } of [...boxes].reverse()) {
    const color = [...rgbOf(classColor(index)), ALPHA];
    const right = cell(box.x1, width, sent.width, Math.ceil);
    const bottom = cell(box.y1, height, sent.height, Math.ceil);
    for (let y = cell(box.y0, height, sent.height, Math.floor); y < bottom; y++) {
      for (let x = cell(box.x0, width, sent.width, Math.floor); x < right; x++) {
        const sum = rest.reduce((total, v, k) => total + v * flat[((n * planes + k) * height + y) * width + x], 0);
        if (sum > 0) rgba.set(color, 4 * (y * width + x));
      }
    }
  }
  return canvasOf({ width, height, rgba });
}

// Draw the points of a pose, [x, y, score] each in pixels of the picture that was sent.
function drawPose(context, zoom, { rest, index }, { place, photo }) {
  const points = Array.from({ length: rest.length / 3 }, (_, i) => {
    const [x, y, score] = rest.slice(3 * i, 3 * i + 3);
    const { x0, y0 } = boxOnPhoto({ x0: x, y0: y, x1: x, y1: y }, place, photo);
    return score >= SEEN && [x0 * zoom, y0 * zoom];
  });
  const size = Math.max(2, context.canvas.width / 200);
  Object.assign(context, { lineWidth: size, strokeStyle: classColor(index), fillStyle: "#fff" });
  context.beginPath();
  for (const [a, b] of points.length === 17 ? BONES : []) {
    if (points[a] && points[b]) context.moveTo(...points[a]), context.lineTo(...points[b]);
  }
  context.stroke();
  for (const point of points.filter(Boolean)) {
    context.beginPath();
    context.arc(...point, 1.5 * size, 0, 7);
    context.fill();
    context.stroke();
  }
}

// `heads`: as `headsOf` returns them; `sent`: the pictures that were sent.
export function Detections({ heads, sent, names }) {
  const [kind, setKind] = useState(heads[0].isCertain ? heads[0].kind : OFF);
  const [order, setOrder] = useState("");
  const [threshold, setThreshold] = useState(THRESHOLD);
  const [at, setAt] = useState(0);
  const [marked, setMarked] = useState(-1);
  const head = heads.find((each) => each.kind === kind);
  const picture = sent[at];
  const { photo } = picture;
  const chosen = head?.orders.includes(order) ? order : head?.orders[0];
  const all = useMemo(() => (head ? head.read(at, chosen) : []), [head, at, chosen]);
  const boxes = useMemo(() => all.filter((box) => box.score >= threshold).slice(0, MAX_DRAWN)
    .map((box) => ({ ...box, ...boxOnPhoto(box, picture.place, photo), sent: box })), [all, threshold]);
  const draw = useMemo(() => (context, size) => {
    const count = boxes[0]?.rest?.length;
    if (!count) return;
    if (head.prototypes?.shape[1] === count) drawOnPhoto(context, size, masksOf(boxes, head.prototypes, at, picture), picture);
    else if (count % 3 === 0) boxes.forEach((box) => drawPose(context, size.width / photo.width, box, picture));
  }, [boxes]);
  const count = `${boxes.length === MAX_DRAWN ? "the first " : ""}${boxes.length} box${boxes.length === 1 ? "" : "es"}`;
  return html`<section class="output" aria-label="Boxes on the photo"><h2>Boxes on the photo</h2>
    <div class="choices">
      <${Choice} label="read as" value=${kind} options=${[...heads.map((each) => each.kind), OFF]} onChange=${setKind} />
      ${head?.orders.length > 1 && html`<${Choice} label="numbers of a box" value=${chosen} options=${head.orders} onChange=${setOrder} />`}
      ${head && html`<label>score from ${threshold.toFixed(2)} <input type="range" min="0.01" max="1" step="0.01" value=${threshold}
        onInput=${(e) => setThreshold(Number(e.target.value))} /></label>`}
      ${sent.length > 1 && html`<label>photo <select value=${at} onChange=${(e) => setAt(Number(e.target.value))}>
        ${sent.map(({ name }, i) => html`<option value=${i}>${name}</option>`)}</select></label>`}
    </div>
    ${head && html`<${Overlay} photo=${photo} draw=${draw} label=${`Photo ${photo.name} with ${count}`}>
        ${boxes.map((box, i) => html`<${Box} key=${i} box=${box} photo=${photo} name=${nameOf(names, box.index)} isFaint=${marked >= 0 && marked !== i} isNamed=${boxes.length <= MAX_NAMED || marked === i} />`)}<//>
      <p class="note" role="status">${count} of ${all.length}</p>
      ${boxes.length > 0 && html`<div class="scroll short" tabindex="0" role="region" aria-label="List of boxes"><table class="values"><thead><tr><th scope="col">class</th><th scope="col">score</th>
          ${["x", "y", "width", "height"].map((title) => html`<th scope="col" class="number">${title}</th>`)}</tr></thead>
        <tbody>${boxes.map((box, i) => html`<tr onMouseEnter=${() => setMarked(i)} onMouseLeave=${() => setMarked(-1)}><th scope="row">${nameOf(names, box.index)}</th><td>${percent(box.score)}</td>
          ${[box.x0, box.y0, box.x1 - box.x0, box.y1 - box.y0].map((v) => html`<td class="number">${v.toFixed(1)}</td>`)}</tr>`)}</tbody></table></div>`}`}
  </section>`;
}
