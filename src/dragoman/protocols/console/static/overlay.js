// A photo with something drawn on it.
import { html, useEffect, useRef } from "./html.js";
import { shownSize } from "./photos.js";

const MIN_WIDTH = 320; // of a small photo on the page

// `draw(context, size)` draws on a canvas above the photo; `children` lie above both, in percent of its sides.
export function Overlay({ photo, label, draw = null, children }) {
  const below = useRef(null);
  const above = useRef(null);
  const size = shownSize(photo);
  useEffect(() => {
    below.current.getContext("2d").drawImage(photo.bitmap, 0, 0, size.width, size.height);
  }, [photo]);
  useEffect(() => {
    const context = above.current.getContext("2d");
    context.clearRect(0, 0, size.width, size.height);
    draw?.(context, size);
  }, [photo, draw]);
  return html`<div class="overlay" role="img" aria-label=${label} style=${{ width: `${Math.max(size.width, MIN_WIDTH)}px` }}>
    <canvas ref=${below} width=${size.width} height=${size.height}></canvas>
    <canvas ref=${above} width=${size.width} height=${size.height}></canvas>${children}</div>`;
}

// Draw the picture of an output where the pixels that were sent lie on the photo.
export function drawOnPhoto(context, { width, height }, layer, { place, photo, width: sentWidth, height: sentHeight }) {
  const zoom = width / photo.width;
  const x = (-place.x / place.scaleX) * zoom;
  const y = (-place.y / place.scaleY) * (height / photo.height);
  context.drawImage(layer, x, y, (sentWidth / place.scaleX) * zoom, (sentHeight / place.scaleY) * (height / photo.height));
}

// RGBA values as a canvas.
export function canvasOf({ width, height, rgba }) {
  const canvas = new OffscreenCanvas(width, height);
  canvas.getContext("2d").putImageData(new ImageData(rgba, width, height), 0, 0);
  return canvas;
}
