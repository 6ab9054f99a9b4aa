// Pictures as tensors, and tensors as pictures.
import { html, useEffect, useRef } from "./html.js";

const CHANNELS = [1, 3, 4];
const MAX_SHOWN = 8;
const MIN_SIDE = 8;
const MAX_SIDE = 8192; // longer axes are sounds
const ARRAYS = {
  UINT8: Uint8Array, INT8: Int8Array, UINT16: Uint16Array, INT16: Int16Array, UINT32: Uint32Array, INT32: Int32Array,
  FP16: globalThis.Float16Array, FP32: Float32Array, FP64: Float64Array,
};
const MEAN = [0.485, 0.456, 0.406, 0];
const DEVIATION = [0.229, 0.224, 0.225, 1];

// How the value of a pixel, from 0 to 255, becomes an element.
export const SCALES = {
  "0 to 255": (v) => v,
  "0 to 1": (v) => v / 255,
  "-1 to 1": (v) => v / 127.5 - 1,
  "ImageNet mean and deviation": (v, channel) => (v / 255 - MEAN[channel]) / DEVIATION[channel],
};
export const grey = (r, g, b) => 0.299 * r + 0.587 * g + 0.114 * b;

// Whether a shape is a batch of matrices: they are pictures in grey if they are square, else steps of time, as a rule.
const isRows = (shape) => shape.length === 3 && shape[0] < 0 && shape[1] > 0 && shape[2] > 0 && !shape.some((n) => CHANNELS.includes(n));

// How many channels an input has, -1 for any number.
export const channelsOf = (shape, { channel }) => (channel < 0 ? 1 : shape[channel]);

// Which axes of a shape are those of pictures, -1 for an axis that it does not have; null for other shapes. `layout` chooses
// where the channels are, if the shape leaves it open: NCHW or NHWC.
export function pictureAxes(shape, layout = "") {
  if (shape.length < 3 || shape.length > 4 || Math.max(...shape) > MAX_SIDE) return null;
  if (isRows(shape)) return shape[1] === shape[2] && shape[1] > 0 ? { batch: 0, channel: -1, height: 1, width: 2 } : null;
  const batch = shape.length === 4 ? 0 : -1;
  const [first, last] = [batch + 1, shape.length - 1];
  const candidates = { NCHW: [first], NHWC: [last] }[layout] ?? [last, first];
  const isChannel = (axis) => CHANNELS.includes(shape[axis]);
  const isFixed = !layout || !isChannel(layout === "NCHW" ? last : first); // the other axis is not certain
  const channel = candidates.find(isChannel) ?? (isFixed ? candidates.find((axis) => shape[axis] === -1) : undefined);
  if (channel === undefined) return null;
  const height = channel === first ? first + 1 : first;
  return { batch, channel, height, width: height + 1 };
}

// Whether an input takes pictures: no states, no rows of steps of time, [-1, 100, 3].
export function takesPictures({ datatype, shape, anyRank }) {
  const axes = anyRank || !ARRAYS[datatype] ? null : pictureAxes(shape);
  if (axes === null) return false;
  const sides = [shape[axes.height], shape[axes.width]];
  const isSeries = axes.height === 0 && sides[0] < 0 && sides[1] > 0;
  const least = shape.length === 4 ? 2 : MIN_SIDE; // three axes say less
  return !isSeries && sides.every((n) => n < 0 || n >= least);
}

// The elements of pictures for an input, as bytes, and their shape. Throws an Error.
export function pictureTensor(pictures, { shape, datatype }, { scale, layout = "", order = "RGB" }) {
  const axes = pictureAxes(shape, layout);
  const [{ width, height }] = pictures;
  if (pictures.some((p) => p.width !== width || p.height !== height)) throw new Error("the pictures differ in size");
  if (pictures.length > 1 && axes.batch < 0) throw new Error(`expected one picture, got ${pictures.length}`);
  const channels = channelsOf(shape, axes) > 0 ? channelsOf(shape, axes) : 3;
  const sent = [...shape];
  if (axes.channel >= 0) sent[axes.channel] = channels;
  Object.assign(sent, { [axes.height]: height, [axes.width]: width });
  if (axes.batch >= 0) sent[axes.batch] = pictures.length;
  const [pixels, isFirst] = [width * height, axes.channel < axes.height];
  const values = new ARRAYS[datatype](pictures.length * pixels * channels);
  const convert = SCALES[scale];
  pictures.forEach(({ rgba }, n) => {
    for (let pixel = 0; pixel < pixels; pixel++) {
      for (let c = 0; c < channels; c++) {
        const from = order === "BGR" && c < 3 ? 2 - c : c;
        const value = channels === 1 ? grey(...rgba.subarray(4 * pixel, 4 * pixel + 3)) : rgba[4 * pixel + from];
        const at = n * pixels * channels + (isFirst ? c * pixels + pixel : pixel * channels + c);
        const element = datatype.startsWith("FP") ? convert(value, from) : Math.round(convert(value, from));
        values[at] = element;
        if (!datatype.startsWith("FP") && values[at] !== element) throw new Error(`the pixel value ${element} does not fit ${datatype}`);
      }
    }
  });
  return { bytes: new Uint8Array(values.buffer), shape: sent };
}

// The bytes of a file as the one element of a BYTES tensor.
export function fileTensor(bytes, { shape }) {
  const found = new Uint8Array(4 + bytes.byteLength);
  new DataView(found.buffer).setUint32(0, bytes.byteLength, true);
  found.set(new Uint8Array(bytes), 4);
  return { bytes: found, shape: shape.map(() => 1) };
}

// The pictures in a tensor of numbers: { width, height, rgba, range } each; none if its shape is not that of pictures.
export function picturesOf({ shape, datatype, data }) {
  const axes = shape.length === 2 ? { batch: -1, channel: -1, height: 0, width: 1 } : pictureAxes(shape);
  const flat = data.flat(Infinity);
  if (!axes || !flat.every(Number.isFinite)) return [];
  const [width, height] = [shape[axes.width], shape[axes.height]];
  const channels = axes.channel < 0 ? 1 : shape[axes.channel];
  if (!CHANNELS.includes(channels) || width * height === 0) return [];
  const [pixels, isFirst] = [width * height, axes.channel >= 0 && axes.channel < axes.height];
  const range = rangeOf(flat, datatype);
  const level = (v) => (255 * (v - range[0])) / (range[1] - range[0] || 1);
  return Array.from({ length: Math.min(axes.batch < 0 ? 1 : shape[0], MAX_SHOWN) }, (_, n) => {
    const rgba = new Uint8ClampedArray(4 * pixels);
    for (let pixel = 0; pixel < pixels; pixel++) {
      const element = (c) => level(flat[n * pixels * channels + (isFirst ? c * pixels + pixel : pixel * channels + c)]);
      for (let c = 0; c < 3; c++) rgba[4 * pixel + c] = element(channels === 1 ? 0 : c);
      rgba[4 * pixel + 3] = channels === 4 ? element(3) : 255;
    }
    return { width, height, rgba, range };
  });
}

// The values that are shown as black and white.
function rangeOf(flat, datatype) {
  if (datatype === "UINT8") return [0, 255];
  const [low, high] = flat.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  return low >= 0 && high <= 1 ? [0, 1] : [low, high];
}

const ENCODED = /^(?:iVBORw0KGgo|\/9j\/)[A-Za-z0-9+/]+={0,2}$/;

// The data URL of a PNG or JPEG in base64, null for any other text.
export function encodedPicture(text) {
  if (typeof text !== "string" || !ENCODED.test(text)) return null;
  return `data:image/${text.startsWith("/") ? "jpeg" : "png"};base64,${text}`;
}

export function Picture({ picture, label }) {
  const holder = useRef(null);
  useEffect(() => {
    const { width, height, rgba } = picture;
    holder.current.getContext("2d").putImageData(new ImageData(rgba, width, height), 0, 0);
  }, [picture]);
  const zoom = Math.max(1, Math.floor(160 / Math.max(picture.width, picture.height)));
  return html`<canvas ref=${holder} class="picture" width=${picture.width} height=${picture.height} role="img" aria-label=${label}
    style=${{ width: `${picture.width * zoom}px` }}></canvas>`;
}
