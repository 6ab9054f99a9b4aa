// Photos from files, and how they become the picture that an input takes: size, fit, axes, channels and values.
import { channelsOf, grey, pictureAxes } from "./images.js";

const MAX_SIDE = 1024; // of a picture that is sent as it is
const MAX_SHOWN = 2048; // of a photo on the page
const USEFUL_SIDE = 64; // an example of a smaller picture says only what runs
const GREY = "rgb(114, 114, 114)"; // around a photo in a letterbox, as detectors were trained
const IMAGENET = [1000, 1001];

export const LETTERBOX = "letterbox";
export const CROP = "crop the middle";
export const STRETCH = "stretch";
export const AS_IS = "as it is";
const LAYOUTS = ["NHWC", "NCHW"];

// Which fits an input allows: only free sides can follow the photo.
export const fitsOf = (shape, axes) => [LETTERBOX, CROP, STRETCH, ...(shape[axes.height] < 0 && shape[axes.width] < 0 ? [AS_IS] : [])];

// The layouts that a shape allows.
export const layoutsOf = (shape) => LAYOUTS.filter((layout) => pictureAxes(shape, layout) !== null);

const isClasses = (shape) => shape.length >= 2 && shape[1] !== 1 && shape.slice(2).every((n) => n === 1);

// How to send photos at first. `trial` is the shape of an example that ran or null, `outputs` are of the metadata.
export function firstSettings({ shape, datatype }, trial, outputs) {
  const layout = layoutsOf(shape)[0];
  const axes = pictureAxes(shape, layout);
  const outs = outputs.map((output) => output.shape);
  const isFloat = datatype.startsWith("FP");
  const side = (axis, free) => (shape[axis] > 0 ? shape[axis] : trial?.[axis] >= USEFUL_SIDE ? trial[axis] : free);
  const isClassifier = outs.length > 0 && !(outs.length > 1 && outs.some(isBoxes)) && outs.every((out) => isClasses(out) || out.length === 1);
  const free = isClassifier && outs.some((out) => out[1] > 2) ? 224 : 640;
  const isFree = shape[axes.height] < 0 && shape[axes.width] < 0;
  return {
    layout,
    width: side(axes.width, free),
    height: side(axes.height, free),
    fit: isFree && !isFloat ? AS_IS : isClassifier ? CROP : isFree || outs.some(isBoxes) ? LETTERBOX : STRETCH,
    order: "RGB",
    scale: !isFloat ? "0 to 255" : outs.some((out) => IMAGENET.includes(out[1])) ? "ImageNet mean and deviation" : "0 to 1",
  };
}

// Boxes of a detector have three axes, or four numbers each.
const isBoxes = (out) => out.length === 3 || (out.length === 2 && out[1] === 4);

// Where a photo lies in the picture that is sent: sent = scale * photo + offset, on both axes.
export function placement({ width, height }, { width: W, height: H }, fit) {
  if (fit === STRETCH || fit === AS_IS) return { scaleX: W / width, scaleY: H / height, x: 0, y: 0 };
  const scale = fit === LETTERBOX ? Math.min(W / width, H / height) : Math.max(W / width, H / height);
  const [w, h] = [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
  return { scaleX: w / width, scaleY: h / height, x: Math.floor((W - w) / 2), y: Math.floor((H - h) / 2) };
}

// A box of the sent picture as a box of the photo, cut at its edges.
export function boxOnPhoto({ x0, y0, x1, y1 }, { scaleX, scaleY, x, y }, { width, height }) {
  const cut = (v, most) => Math.min(most, Math.max(0, v));
  const [left, right] = [x0, x1].map((v) => cut((v - x) / scaleX, width));
  const [top, bottom] = [y0, y1].map((v) => cut((v - y) / scaleY, height));
  return { x0: left, y0: top, x1: right, y1: bottom };
}

// Read a file as { name, width, height, bitmap }. Throws an Error.
export async function readPhoto(file) {
  try {
    const bitmap = await createImageBitmap(file);
    return { name: file.name, width: bitmap.width, height: bitmap.height, bitmap };
  } catch {
    throw new Error(`'${file.name}' is not a picture that this browser can read`);
  }
}

// The size in which a photo is sent.
export function sentSize(photo, { shape }, { width, height, fit, layout }) {
  if (fit !== AS_IS) return { width, height };
  const axes = pictureAxes(shape, layout);
  const shrink = Math.min(1, MAX_SIDE / Math.max(photo.width, photo.height));
  const side = (axis, own) => (shape[axis] > 0 ? shape[axis] : Math.max(1, Math.round(own * shrink)));
  return { width: side(axes.width, photo.width), height: side(axes.height, photo.height) };
}

// A photo as the picture that is sent: { name, width, height, rgba, place, photo, isGrey }. Throws an Error.
export function drawPhoto(photo, field, settings) {
  const { width, height } = sentSize(photo, field, settings);
  if (!(width >= 1 && height >= 1 && width <= 8192 && height <= 8192)) throw new Error("expected a width and a height of 1 to 8192 pixels");
  const place = placement(photo, { width, height }, settings.fit);
  const channels = channelsOf(field.shape, pictureAxes(field.shape, settings.layout));
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  if (channels !== 4) {
    context.fillStyle = "white"; // behind what is transparent
    context.fillRect(0, 0, width, height);
  }
  if (settings.fit === LETTERBOX) {
    context.fillStyle = GREY;
    context.fillRect(0, 0, width, height);
  }
  context.drawImage(photo.bitmap, place.x, place.y, photo.width * place.scaleX, photo.height * place.scaleY);
  return { name: photo.name, width, height, rgba: context.getImageData(0, 0, width, height).data, place, photo, isGrey: channels === 1 };
}

// The pixels as the input gets them, to look at: in the order of its channels, grey if there is one.
export function preview({ width, height, rgba }, { shape }, { order, layout }) {
  const channels = channelsOf(shape, pictureAxes(shape, layout));
  if (order === "RGB" && channels !== 1) return { width, height, rgba };
  const found = new Uint8ClampedArray(rgba);
  for (let i = 0; i < found.length; i += 4) {
    const [r, g, b] = rgba.subarray(i, i + 3);
    if (channels === 1) found.fill(grey(r, g, b), i, i + 3), (found[i + 3] = 255);
    else [found[i], found[i + 2]] = [b, r];
  }
  return { width, height, rgba: found };
}

// A photo on a canvas of the page, at most so large.
export function shownSize({ width, height }) {
  const shrink = Math.min(1, MAX_SHOWN / Math.max(width, height));
  return { width: Math.max(1, Math.round(width * shrink)), height: Math.max(1, Math.round(height * shrink)) };
}
