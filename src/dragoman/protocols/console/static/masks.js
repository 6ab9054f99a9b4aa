// Segmentations and maps of values (depth, heat) from outputs, on the photo that was sent.
import { Choice } from "./choice.js";
import { classColor, COLOR_MAPS, rgbOf } from "./colors.js";
import { html, useMemo, useState } from "./html.js";
import { Picture } from "./images.js";
import { canvasOf, drawOnPhoto, Overlay } from "./overlay.js";
import { format } from "./plot.js";
import { percent } from "./reading.js";
import { isFloat } from "./tensors.js";

const MIN_SIDE = 8;
const MAX_CLASSES = 64; // of a map of integers: pictures have more
const MAX_LISTED = 12;
const MASK_NAME = /mask|seg|class|label|logit|prob/i;

// The planes of a tensor: { n, planes, height, width, at(picture, plane, pixel) } by each way to read its axes.
function planesOf({ shape, data }) {
  const flat = data.flat(Infinity);
  const way = (n, planes, height, width, isLast) => ({
    n, planes, height, width, flat,
    at: isLast
      ? (i, plane, pixel) => flat[(i * height * width + pixel) * planes + plane]
      : (i, plane, pixel) => flat[(i * planes + plane) * height * width + pixel],
  });
  if (shape.length === 2) return [way(1, 1, ...shape, false)];
  if (shape.length === 3) return [way(shape[0], 1, shape[1], shape[2], false)];
  if (shape.length !== 4) return [];
  const [n, a, b, c] = shape;
  return [way(n, a, b, c, false), way(n, c, a, b, true)];
}

const isLike = (planes, size) => Math.abs(planes.width * size.height - planes.height * size.width) <= 0.01 * planes.height * size.width;

// The planes whose sides are like those of the picture that was sent, or a fraction of them; without one, the longest sides.
function fitting(tensor, size) {
  const ways = planesOf(tensor).filter((way) => Math.min(way.width, way.height) >= MIN_SIDE && way.n > 0 && (!size || isLike(way, size)));
  return ways.sort((a, b) => a.planes - b.planes)[0] ?? null;
}

// The classes of the pixels in a tensor: { isCertain, n, width, height, classes(i) }; null if it has none. `size` is that of the
// picture that was sent or null.
export function maskOf(tensor, size, names = null) {
  const way = fitting(tensor, size);
  if (!way) return null;
  const { n, planes, width, height, flat, at } = way;
  const pixels = width * height;
  if (planes === 1) {
    const values = new Set();
    for (const v of flat) {
      const whole = Number(v);
      if (v === null || !Number.isInteger(whole) || values.add(whole).size > MAX_CLASSES) return null;
    }
    if (isFloat(tensor) && !MASK_NAME.test(tensor.name) && !names) return null;
    if (tensor.shape.length === 2 && !size) return null;
    return { isCertain: Boolean(size || names || MASK_NAME.test(tensor.name)), n, width, height, classes: (i) => Array.from({ length: pixels }, (_, p) => Number(at(i, 0, p))) };
  }
  if (!isFloat(tensor) || flat.some((v) => v === null)) return null;
  const mayBePicture = planes === 3 || planes === 4;
  const classes = (i) => Array.from({ length: pixels }, (_, p) => {
    let most = 0;
    for (let k = 1; k < planes; k++) if (at(i, k, p) > at(i, most, p)) most = k;
    return most;
  });
  return { isCertain: Boolean(size) && (!mayBePicture || names?.length === planes || MASK_NAME.test(tensor.name)), n, width, height, classes };
}

// One value for each pixel: { n, width, height, values(i), range }; null if a tensor has none.
export function heatOf(tensor, size) {
  const way = fitting(tensor, size);
  if (!way || way.planes !== 1 || !isFloat(tensor) || (tensor.shape.length === 2 && !size)) return null;
  const [low, high] = way.flat.reduce(([a, b], v) => (Number.isFinite(v) ? [Math.min(a, v), Math.max(b, v)] : [a, b]), [Infinity, -Infinity]);
  if (low > high) return null; // no value is finite
  const pixels = way.width * way.height;
  return { ...way, range: [low, high], values: (i) => Array.from({ length: pixels }, (_, p) => way.at(i, 0, p)) };
}

const rgbaOf = (width, height, color) => {
  const rgba = new Uint8ClampedArray(4 * width * height);
  for (let pixel = 0; pixel < width * height; pixel++) {
    const found = color(pixel);
    if (found) rgba.set(found.length === 4 ? found : [...found, 255], 4 * pixel);
  }
  return { width, height, rgba };
};

// A coloured picture above the photo, or alone.
function Layer({ picture, sent, opacity, isSmooth, label }) {
  const draw = useMemo(() => (context, size) => {
    context.globalAlpha = opacity;
    context.imageSmoothingEnabled = isSmooth;
    drawOnPhoto(context, size, canvasOf(picture), sent);
    context.globalAlpha = 1;
  }, [picture, sent, opacity]);
  return sent ? html`<${Overlay} photo=${sent.photo} label=${label} draw=${draw} />` : html`<${Picture} picture=${picture} label=${label} />`;
}

function Controls({ count, at, onAt, sent, opacity, onOpacity, children }) {
  return html`<div class="choices">${children}
    ${sent && html`<label>above the photo <input type="range" min="0" max="1" step="0.05" value=${opacity} onInput=${(e) => onOpacity(Number(e.target.value))} /></label>`}
    ${count > 1 && html`<label>picture <select value=${at} onChange=${(e) => onAt(Number(e.target.value))}>
      ${Array.from({ length: count }, (_, i) => html`<option value=${i}>${i + 1}</option>`)}</select></label>`}</div>`;
}

// Whether a pixel lies on the photo, not beside it in a letterbox.
function isOnPhoto(pixel, { width, height }, sent) {
  if (!sent) return true;
  const { place, photo } = sent;
  const x = (((pixel % width) + 0.5) * sent.width) / width - place.x;
  const y = ((Math.floor(pixel / width) + 0.5) * sent.height) / height - place.y;
  return x >= 0 && y >= 0 && x <= photo.width * place.scaleX && y <= photo.height * place.scaleY;
}

export function Mask({ title, mask, sent, names }) {
  const [at, setAt] = useState(0);
  const [opacity, setOpacity] = useState(0.55);
  const classes = useMemo(() => mask.classes(at), [mask, at]);
  const counts = useMemo(() => {
    const found = new Map();
    classes.forEach((k, p) => isOnPhoto(p, mask, sent[at]) && found.set(k, (found.get(k) ?? 0) + 1));
    return [...found].sort((a, b) => b[1] - a[1]);
  }, [classes]);
  const total = counts.reduce((sum, [, count]) => sum + count, 0);
  // Class 0 is mostly the background: the photo shows through.
  const picture = useMemo(() => rgbaOf(mask.width, mask.height, (p) => (classes[p] === 0 && sent[at] ? null : rgbOf(classColor(classes[p])))), [classes]);
  return html`<${Controls} count=${mask.n} at=${at} onAt=${setAt} sent=${sent[at]} opacity=${opacity} onOpacity=${setOpacity} />
    <${Layer} picture=${picture} sent=${sent[at]} opacity=${opacity} label=${`${title}: ${counts.length} classes`} />
    <ul class="legend-list">${counts.slice(0, MAX_LISTED).map(([k, count]) => html`<li><svg class="swatch" viewBox="0 0 12 12" aria-hidden="true">
      <rect width="12" height="12" fill=${k === 0 && sent[at] ? "none" : classColor(k)} stroke="currentColor" /></svg> ${names?.[k] ?? `class ${k}`} <small>${percent(count / total)}</small></li>`)}</ul>
    ${counts.length > MAX_LISTED && html`<p class="note">The ${MAX_LISTED} largest of ${counts.length} classes.</p>`}`;
}

export function Heat({ title, heat, sent }) {
  const [at, setAt] = useState(0);
  const [opacity, setOpacity] = useState(0.65);
  const [map, setMap] = useState("viridis");
  const [low, high] = heat.range;
  const values = useMemo(() => heat.values(at), [heat, at]);
  // Low shares let the photo through: they say that there is nothing.
  const alpha = sent[at] && low >= 0 && high <= 1 ? (t) => Math.round(255 * Math.min(1, 0.2 + t)) : () => 255;
  const color = (t) => [...COLOR_MAPS[map](t), alpha(t)];
  const picture = useMemo(() => rgbaOf(heat.width, heat.height, (p) => (!Number.isFinite(values[p]) ? null : color((values[p] - low) / (high - low || 1)))), [values, map]);
  return html`<${Controls} count=${heat.n} at=${at} onAt=${setAt} sent=${sent[at]} opacity=${opacity} onOpacity=${setOpacity}>
      <${Choice} label="colours" value=${map} options=${Object.keys(COLOR_MAPS)} onChange=${setMap} /><//>
    <${Layer} picture=${picture} sent=${sent[at]} opacity=${opacity} isSmooth label=${`${title}: ${format(low)} to ${format(high)}`} />
    <${Scale} range=${heat.range} map=${map} />`;
}

// The colours from the least to the largest value.
export function Scale({ range: [low, high], map = "viridis", text = format }) {
  const stops = Array.from({ length: 11 }, (_, i) => `rgb(${COLOR_MAPS[map](i / 10).join()})`);
  return html`<p class="scale"><span>${text(low)}</span><span class="ramp" style=${{ background: `linear-gradient(to right, ${stops.join()})` }}></span><span>${text(high)}</span></p>`;
}
