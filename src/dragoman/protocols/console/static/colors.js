// Colours of values and of classes.

// Eleven points of matplotlib's viridis.
const VIRIDIS = ["440154", "482475", "414487", "355f8d", "2a788e", "21918c", "22a884", "44bf70", "7ad151", "bddf26", "fde725"].map((text) =>
  [0, 2, 4].map((i) => parseInt(text.slice(i, i + 2), 16)));

// The colour of a value from 0 to 1, as [red, green, blue].
export function viridis(t) {
  const at = Math.min(1, Math.max(0, t)) * (VIRIDIS.length - 1);
  const i = Math.min(VIRIDIS.length - 2, Math.floor(at));
  return VIRIDIS[i].map((v, c) => Math.round(v + (VIRIDIS[i + 1][c] - v) * (at - i)));
}

export const greys = (t) => Array(3).fill(Math.round(255 * Math.min(1, Math.max(0, t))));
export const COLOR_MAPS = { viridis, grey: greys };

// Colours that differ from each other, also for most people who see red and green alike (Paul Tol's bright scheme and more).
const CLASSES = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee7733", "#009988", "#cc3311", "#997700", "#332288", "#88ccee"];

export const classColor = (i) => CLASSES[((i % CLASSES.length) + CLASSES.length) % CLASSES.length];

export const rgbOf = (color) => [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));

// Black or white, whichever can be read on a colour.
export function inkOn(color) {
  const [r, g, b] = rgbOf(color);
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#000" : "#fff";
}
