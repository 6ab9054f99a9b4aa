// The boxes of a detector on the photo that was sent.
import { Choice } from "./choice.js";
import { classColor, inkOn } from "./colors.js";
import { html, useMemo, useState } from "./html.js";
import { Overlay } from "./overlay.js";
import { boxOnPhoto } from "./photos.js";
import { percent } from "./reading.js";

const THRESHOLD = 0.25;
const MAX_DRAWN = 200;
const MAX_NAMED = 25; // of more boxes the names would hide the photo
const OFF = "off";

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
  const boxes = all.filter((box) => box.score >= threshold).slice(0, MAX_DRAWN).map((box) => ({ ...box, ...boxOnPhoto(box, picture.place, photo) }));
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
    ${head && html`<${Overlay} photo=${photo} label=${`Photo ${photo.name} with ${count}`}>
        ${boxes.map((box, i) => html`<${Box} key=${i} box=${box} photo=${photo} name=${nameOf(names, box.index)} isFaint=${marked >= 0 && marked !== i} isNamed=${boxes.length <= MAX_NAMED || marked === i} />`)}<//>
      <p class="note" role="status">${count} of ${all.length}</p>
      ${boxes.length > 0 && html`<div class="scroll short" tabindex="0" role="region" aria-label="List of boxes"><table class="values"><thead><tr><th scope="col">class</th><th scope="col">score</th>
          ${["x", "y", "width", "height"].map((title) => html`<th scope="col" class="number">${title}</th>`)}</tr></thead>
        <tbody>${boxes.map((box, i) => html`<tr onMouseEnter=${() => setMarked(i)} onMouseLeave=${() => setMarked(-1)}><th scope="row">${nameOf(names, box.index)}</th><td>${percent(box.score)}</td>
          ${[box.x0, box.y0, box.x1 - box.x0, box.y1 - box.y0].map((v) => html`<td class="number">${v.toFixed(1)}</td>`)}</tr>`)}</tbody></table></div>`}`}
  </section>`;
}
