// Pictures as tensors, and tensors as pictures.
import { html, useEffect, useRef } from "./html.js";

const CHANNELS = [1, 3, 4];
const MAX_SHOWN = 8;
const MAX_SIDE = 8192; // longer axes are sounds
export const ARRAYS = {
  UINT8: Uint8Array, INT8: Int8Array, UINT16: Uint16Array, INT16: Int16Array, UINT32: Uint32Array, INT32: Int32Array,
  FP16: globalThis.Float16Array, FP32: Float32Array, FP64: Float64Array,
};
const NORMALIZED = { mean: [0.485, 0.456, 0.406, 0], std: [0.229, 0.224, 0.225, 1] };

// How the value of a pixel, from 0 to 255, becomes an element: by the name that the server has for it.
export const SCALES = {
  "0..255": { label: "0 to 255", scale: 1 },
  "0..1": { label: "0 to 1", scale: 1 / 255 },
  "-1..1": { label: "-1 to 1", scale: 2 / 255, mean: 1 },
  "-128..127": { label: "-128 to 127", scale: 1, mean: 128 },
  imagenet: { label: "ImageNet mean and deviation", scale: 1 / 255, ...NORMALIZED },
};

// The conversion of a channel, with the roundings of single precision, so that every client sends the same elements.
function conversion({ scale, mean = 0, std = 1 }, channel) {
  const [factor, offset, divisor] = [scale, mean[channel] ?? mean, std[channel] ?? std].map(Math.fround);
  return (v) => Math.fround(Math.fround(Math.fround(v * factor) - offset) / divisor);
}

// A pixel in grey, as a whole number like the colours.
export const grey = (r, g, b) => (19595 * r + 38470 * g + 7471 * b + 32768) >> 16;

// The axes of pictures, -1 for one that a shape does not have. `layout`: NCHW, NHWC or NHW, without N for three axes of one picture.
export function axesOf({ layout }, { length }) {
  const letters = layout.slice(-length);
  return { batch: letters.indexOf("N"), channel: letters.indexOf("C"), height: letters.indexOf("H"), width: letters.indexOf("W") };
}

// How many channels an input has.
export function channelsOf(shape, settings) {
  const { channel } = axesOf(settings, shape);
  return channel < 0 ? 1 : shape[channel] > 0 ? shape[channel] : settings.channels;
}

// The elements of pictures for an input, as bytes, and their shape. Throws an Error.
export function pictureTensor(pictures, { shape, datatype }, settings) {
  const { values: scale, order = "RGB" } = settings;
  const axes = axesOf(settings, shape);
  const [{ width, height }] = pictures;
  if (pictures.some((p) => p.width !== width || p.height !== height)) throw new Error("the pictures differ in size");
  if (pictures.length > 1 && axes.batch < 0) throw new Error(`expected one picture, got ${pictures.length}`);
  const channels = channelsOf(shape, settings);
  const sent = [...shape];
  if (axes.channel >= 0) sent[axes.channel] = channels;
  Object.assign(sent, { [axes.height]: height, [axes.width]: width });
  if (axes.batch >= 0) sent[axes.batch] = pictures.length;
  const [pixels, isFirst] = [width * height, axes.channel < axes.height];
  const values = new ARRAYS[datatype](pictures.length * pixels * channels);
  const convert = [0, 1, 2, 3].map((channel) => conversion(SCALES[scale], channel));
  pictures.forEach(({ rgba }, n) => {
    for (let pixel = 0; pixel < pixels; pixel++) {
      for (let c = 0; c < channels; c++) {
        const from = order === "BGR" && c < 3 ? 2 - c : c;
        const value = channels === 1 ? grey(...rgba.subarray(4 * pixel, 4 * pixel + 3)) : rgba[4 * pixel + from];
        const at = n * pixels * channels + (isFirst ? c * pixels + pixel : pixel * channels + c);
        const element = datatype.startsWith("FP") ? convert[from](value) : Math.round(convert[from](value));
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
  const layout = shape.length === 2 ? "HW" : ["NHWC", "NCHW"].find((each) => [3, 4].includes(shape.length) && CHANNELS.includes(shape[axesOf({ layout: each }, shape).channel]));
  const axes = layout && Math.max(...shape) <= MAX_SIDE ? axesOf({ layout }, shape) : null;
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
