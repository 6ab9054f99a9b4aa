// Photos from files, and how they become the picture that an input takes: size, fit, axes, channels and values.
import { axesOf, channelsOf, grey } from "./images.js";

const MAX_SIDE = 1024; // of a picture that is sent as it is
const MAX_SHOWN = 2048; // of a photo on the page
const GREY = "rgb(114, 114, 114)"; // around a photo in a letterbox, as detectors were trained

export const LETTERBOX = "letterbox";
export const CROP = "crop";
export const STRETCH = "stretch";
export const AS_IS = "own";
export const FITS = { [LETTERBOX]: "letterbox", [CROP]: "crop the middle", [STRETCH]: "stretch", [AS_IS]: "as it is" };

// Which fits an input allows: only free sides can follow the photo.
export const fitsOf = ({ is_free }) => Object.keys(FITS).filter((fit) => fit !== AS_IS || is_free);

// How to send photos at first. `told` is what the server says of the input.
export const firstSettings = (told) => ({ ...told, fit: told.keeps_size ? AS_IS : told.fit, order: "RGB" });

const rounded = (length) => Math.max(1, Math.round(length));

// Where a photo lies in the picture that is sent: sent = scale * photo + offset, on both axes.
export function placement({ width, height }, { width: W, height: H }, fit) {
  if (fit === STRETCH || fit === AS_IS) return { scaleX: W / width, scaleY: H / height, x: 0, y: 0 };
  if (fit === CROP) {
    const scale = Math.max(W / width, H / height);
    return { scaleX: scale, scaleY: scale, x: (W - width * scale) / 2, y: (H - height * scale) / 2 };
  }
  const scale = Math.min(W / width, H / height);
  const [w, h] = [rounded(width * scale), rounded(height * scale)];
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
    const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" }); // models were trained with such pixels
    return { name: file.name, width: bitmap.width, height: bitmap.height, bitmap };
  } catch {
    throw new Error(`'${file.name}' is not a picture that this browser can read`);
  }
}

// The size in which a photo is sent. A side that is not set keeps the proportions of the photo.
export function sentSize(photo, { width, height, fit }) {
  if (fit === AS_IS) {
    const shrink = Math.min(1, MAX_SIDE / Math.max(photo.width, photo.height));
    return { width: rounded(photo.width * shrink), height: rounded(photo.height * shrink) };
  }
  return { width: width ?? rounded((photo.width * height) / photo.height), height: height ?? rounded((photo.height * width) / photo.width) };
}

// A photo as the picture that is sent: { name, width, height, rgba, place, photo, isGrey }. Throws an Error.
export function drawPhoto(photo, field, settings) {
  const { width, height } = sentSize(photo, settings);
  if (!(width >= 1 && height >= 1 && width <= 8192 && height <= 8192)) throw new Error("expected a width and a height of 1 to 8192 pixels");
  const place = placement(photo, { width, height }, settings.fit);
  const channels = channelsOf(field.shape, settings);
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "medium";
  const [drawnWidth, drawnHeight] = [photo.width * place.scaleX, photo.height * place.scaleY];
  if (settings.fit === LETTERBOX) {
    context.fillStyle = GREY;
    context.fillRect(0, 0, width, height);
    context.clearRect(place.x, place.y, drawnWidth, drawnHeight);
  }
  context.drawImage(photo.bitmap, place.x, place.y, drawnWidth, drawnHeight);
  if (channels !== 4) {
    context.globalCompositeOperation = "destination-over";
    context.fillStyle = "white"; // behind what is transparent
    context.fillRect(0, 0, width, height);
  }
  return { name: photo.name, width, height, rgba: context.getImageData(0, 0, width, height).data, place, photo, isGrey: channels === 1 };
}

// The pixels as the input gets them, to look at: in the order of its channels, grey if there is one.
export function preview({ width, height, rgba }, { shape }, settings) {
  const { order } = settings;
  const channels = channelsOf(shape, settings);
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
