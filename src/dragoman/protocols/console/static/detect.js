// Boxes of objects from the outputs of detectors: pure functions of the numbers. A box is { x0, y0, x1, y1, score, index } in
// pixels of the picture that was sent; `index` is that of the class, and `rest`, if there is one, has the further numbers of its
// row: coefficients of a mask, or points of a pose. Outputs: { name, datatype, shape, data } each.
import { softmax } from "./reading.js";
import { isFloat } from "./tensors.js";

const STRIDES = [8, 16, 32];
const LARGE_STRIDES = [...STRIDES, 64];
const MAX_BOXES = 300; // of an end-to-end detector
const MIN_ANCHORS = 100;
const MIN_SCORE = 0.01; // lower ones are not read
const MAX_CANDIDATES = 2000; // before overlapping ones are removed
const OVERLAP = 0.45;
const NORMALIZED = 2; // coordinates up to here are fractions of the picture


// The numbers of cells of a picture, over the strides of a head.
const cells = ({ width, height }, strides) => strides.reduce((sum, s) => sum + Math.ceil(width / s) * Math.ceil(height / s), 0);
const hasCells = (count, size, times) => [STRIDES, LARGE_STRIDES].some((strides) => count === times * cells(size, strides));

// Corners of a box from four numbers in one of these orders.
export const ORDERS = {
  "x0 y0 x1 y1": (a, b, c, d) => [a, b, c, d],
  "y0 x0 y1 x1": (a, b, c, d) => [b, a, d, c],
  "centre and size": (a, b, c, d) => [a - c / 2, b - d / 2, a + c / 2, b + d / 2],
  "corner and size": (a, b, c, d) => [a, b, a + c, b + d],
};

// The share of the area of two boxes that both cover.
export function overlap(a, b) {
  const width = Math.min(a.x1, b.x1) - Math.max(a.x0, b.x0);
  const height = Math.min(a.y1, b.y1) - Math.max(a.y0, b.y0);
  if (width <= 0 || height <= 0) return 0;
  const area = (box) => (box.x1 - box.x0) * (box.y1 - box.y0);
  return (width * height) / (area(a) + area(b) - width * height);
}

// The boxes of highest score, without those that overlap a better one of their class: non-maximum suppression.
export function suppress(boxes, limit = OVERLAP) {
  const kept = [];
  for (const box of [...boxes].sort((a, b) => b.score - a.score).slice(0, MAX_CANDIDATES)) {
    if (kept.every((better) => better.index !== box.index || overlap(better, box) <= limit)) kept.push(box);
  }
  return kept;
}

// `rows(i)` gives the four numbers, the score and the class of row i of `count`, or null. Returns the boxes, the best first.
function collect(count, rows, order, { width, height }, suppresses) {
  const found = [];
  let most = 0;
  for (let i = 0; i < count; i++) {
    const row = rows(i);
    if (!row || !(row.score >= MIN_SCORE) || row.box.some((v) => v === null)) continue;
    for (const v of row.box) most = Math.max(most, Math.abs(v));
    const [x0, y0, x1, y1] = ORDERS[order](...row.box);
    if (x1 > x0 && y1 > y0) found.push({ x0, y0, x1, y1, score: row.score, index: row.index, row: i });
  }
  if (most <= NORMALIZED) {
    for (const box of found) Object.assign(box, { x0: box.x0 * width, x1: box.x1 * width, y0: box.y0 * height, y1: box.y1 * height });
  }
  return suppresses ? suppress(found) : found.sort((a, b) => b.score - a.score);
}

// The score and the index of the best of `count` classes. `at` gives a score.
function best(count, at) {
  let index = 0;
  for (let k = 1; k < count; k++) if (at(k) > at(index)) index = k;
  return { score: at(index), index };
}

// How many columns from `from` on hold values of 0 to 1, as scores do: what follows are masks or points.
function scoreColumns(width, from, count, at) {
  let k = from;
  const isScore = (column) => {
    for (let i = 0; i < count; i++) if (!(at(i, column) >= 0 && at(i, column) <= 1)) return false;
    return true;
  };
  while (k < width && isScore(k)) k++;
  return k - from;
}

// The cells of a picture, row by row and stride by stride: { x, y, stride } each.
function cellsOf({ width, height }, count) {
  const strides = [STRIDES, LARGE_STRIDES].find((each) => count === cells({ width, height }, each));
  return strides.flatMap((stride) => {
    const columns = Math.ceil(width / stride);
    return Array.from({ length: columns * Math.ceil(height / stride) }, (_, i) => ({ x: i % columns, y: Math.floor(i / columns), stride }));
  });
}

// A head of [n, values, boxes] or [n, boxes, values] with 4 numbers a box, perhaps a score that there is an object, and
// scores of classes. `isRelative`: centres are relative to their cells, and sizes are logarithms, in strides.
function readGrid(tensor, { isTransposed, hasObjectness, isRelative }, n, size, order) {
  const [, a, b] = tensor.shape;
  const [width, count] = isTransposed ? [a, b] : [b, a];
  const { flat } = tensor;
  const start = n * a * b;
  const at = isTransposed ? (i, k) => flat[start + k * count + i] : (i, k) => flat[start + i * width + k];
  const from = hasObjectness ? 5 : 4;
  const classes = scoreColumns(width, from, count, at);
  const places = isRelative ? cellsOf(size, count) : null;
  const absolute = ([x, y, w, h], cell) => [(x + cell.x) * cell.stride, (y + cell.y) * cell.stride, Math.exp(w) * cell.stride, Math.exp(h) * cell.stride];
  const rest = (i) => Array.from({ length: width - from - classes }, (_, k) => at(i, from + classes + k));
  const boxes = collect(count, (i) => {
    const object = hasObjectness ? at(i, 4) : 1;
    if (classes === 0 && !hasObjectness) return null;
    const { score, index } = classes > 0 ? best(classes, (k) => at(i, from + k)) : { score: 1, index: 0 };
    const box = [at(i, 0), at(i, 1), at(i, 2), at(i, 3)];
    return { box: places ? absolute(box, places[i]) : box, score: object * score, index };
  }, order, size, true);
  return boxes.map((box) => ({ ...box, rest: rest(box.row) }));
}

// Whether a head has a box for each cell, some with a negative size, which is a logarithm then.
function isRelative(tensor, isTransposed, size) {
  const [, count, width] = tensor.shape;
  if (isTransposed || width < 6 || !hasCells(count, size, 1)) return false;
  const { flat } = tensor;
  for (let i = 0; i < count * width; i += width) if (flat[i + 2] < 0 || flat[i + 3] < 0) return true;
  return false;
}

function grids(tensor, size, names) {
  const { shape } = tensor;
  if (!isFloat(tensor) || shape.length !== 3 || Math.min(shape[1], shape[2]) < 5) return [];
  const isTransposed = shape[1] < shape[2];
  const [width, count] = isTransposed ? [shape[1], shape[2]] : [shape[2], shape[1]];
  if (count < MIN_ANCHORS) return [];
  const head = (kind, hasObjectness, isCertain) => ({
    kind,
    isCertain,
    orders: ["centre and size", "x0 y0 x1 y1", "corner and size"],
    read: (n, order) => readGrid(tensor, { isTransposed, hasObjectness }, n, size, order),
  });
  if (isRelative(tensor, isTransposed, size)) {
    const read = (n, order) => readGrid(tensor, { isTransposed, hasObjectness: true, isRelative: true }, n, size, order);
    return [{ kind: "boxes of cells, object and classes (YOLOX)", isCertain: true, orders: ["centre and size"], read }];
  }
  const [single, triple] = [hasCells(count, size, 1), hasCells(count, size, 3)];
  const isNamed = names && [4, 5].includes(width - names.length);
  if (!single && !triple && !isNamed) return [];
  const hasObjectness = isNamed ? width === names.length + 5 : triple || (!isTransposed && width === 85);
  const plain = head("boxes and classes (YOLOv8, 11)", false, !hasObjectness && (isTransposed || Boolean(isNamed)));
  const objects = head("boxes, object and classes (YOLOv5, 7, X)", true, hasObjectness);
  return hasObjectness ? [objects, plain] : [plain, objects];
}

// Rows that are results: corners, score, class and perhaps more, [n, boxes, 6 or more]; or the picture, corners, class and score, [boxes, 7].
function rowsHeads(tensor, size) {
  const { shape } = tensor;
  if (!isFloat(tensor)) return [];
  if (shape.length === 3 && shape[2] >= 6 && shape[1] <= MAX_BOXES && !hasCells(shape[2], size, 1)) {
    const { flat } = tensor;
    const at = (n, i, k) => flat[(n * shape[1] + i) * shape[2] + k];
    const isRow = (n, i) => at(n, i, 4) >= 0 && at(n, i, 4) <= 1 && Number.isInteger(at(n, i, 5)) && at(n, i, 5) >= -1;
    const isCertain = shape[1] > 0 && Array.from({ length: shape[0] * shape[1] }, (_, j) => isRow(Math.floor(j / shape[1]), j % shape[1])).every(Boolean);
    const read = (n, order) => collect(shape[1], (i) => ({ box: [0, 1, 2, 3].map((k) => at(n, i, k)), score: at(n, i, 4), index: at(n, i, 5) }), order, size, false)
      .map((box) => ({ ...box, rest: Array.from({ length: shape[2] - 6 }, (_, k) => at(n, box.row, 6 + k)) }));
    return isCertain ? [{ kind: "results: box, score, class", isCertain, orders: Object.keys(ORDERS), read }] : [];
  }
  if (shape.length === 2 && shape[1] === 7) {
    const { flat } = tensor;
    const at = (i, k) => flat[i * 7 + k];
    const isCertain = Array.from({ length: shape[0] }, (_, i) => i).every(
      (i) => Number.isInteger(at(i, 0)) && Number.isInteger(at(i, 5)) && at(i, 6) >= 0 && at(i, 6) <= 1);
    const read = (n, order) => collect(shape[0], (i) => (at(i, 0) === n ? { box: [1, 2, 3, 4].map((k) => at(i, k)), score: at(i, 6), index: at(i, 5) } : null), order, size, false);
    return isCertain && shape[0] > 0 ? [{ kind: "results: picture, box, class, score", isCertain, orders: Object.keys(ORDERS), read }] : [];
  }
  return [];
}

// Boxes, scores and perhaps classes in tensors of their own.
function separate(outputs, size, names) {
  const isRows = (shape, rest) => shape.length >= 1 + rest && shape.length <= 2 + rest;
  const boxes = outputs.filter((t) => isFloat(t) && t.shape.at(-1) === 4 && isRows(t.shape, 1)).sort((a, b) => b.shape.length - a.shape.length);
  const [box, second] = boxes;
  if (!box || second?.shape.length === box.shape.length) return [];
  const hasBatch = box.shape.length === 3;
  const count = box.shape.at(-2);
  const lead = box.shape.slice(0, -1).join();
  const others = outputs.filter((t) => t !== box);
  const columns = others.filter((t) => t.shape.join() === lead);
  const isWhole = (t) => t.flat.every((v) => v !== null && Number.isInteger(Number(v)));
  const isShare = (t) => isFloat(t) && t.flat.every((v) => v >= 0 && v <= 1);
  const labels = columns.find((t) => /label|class|categ/i.test(t.name) && isWhole(t)) ?? columns.find((t) => !isFloat(t)) ??
    columns.find((t) => isWhole(t) && !isShare(t));
  const scores = columns.find((t) => t !== labels && isShare(t));
  const four = box.flat;
  const at = (n, i) => four.slice(4 * (n * (hasBatch ? count : 0) + i), 4 * (n * (hasBatch ? count : 0) + i) + 4);
  const isNamed = /box|loc|det/i.test(box.name);
  if (scores) {
    const [values, indices] = [scores.flat, labels?.flat];
    const read = (n, order) => collect(count, (i) => ({ box: at(n, i), score: values[n * count + i], index: Number(indices?.[n * count + i] ?? 0) }), order, size, false);
    return [{ kind: "boxes, scores, labels", isCertain: Boolean(isNamed || labels), orders: ordersOf(box.name, false), read }];
  }
  // SSD and DETR: scores of all classes for each box.
  const planes = others.filter((t) => isFloat(t) && t.shape.slice(0, -1).join() === lead && t.shape.at(-1) >= 2);
  if (planes.length !== 1 || count < 2) return [];
  const [plane] = planes;
  const width = plane.shape.at(-1);
  const all = plane.flat;
  const row = (n, i) => all.slice((n * count + i) * width, (n * count + i + 1) * width);
  const isRaw = all.some((v) => v < 0 || v > 1);
  const sums = !isRaw && [0, count - 1].every((i) => Math.abs(row(0, i).reduce((x, y) => x + y, 0) - 1) < 1e-2);
  const isDetr = /pred|logit/i.test(plane.name) && isRaw;
  // Scores that sum to one have a class for "no object": the first of SSD, the last of DETR.
  const [from, to] = isDetr ? [0, width - 1] : sums || isRaw ? [1, width] : [0, width];
  const shift = names && names.length === to - from ? from : 0;
  const read = (n, order) => collect(count, (i) => {
    const values = isRaw ? softmax(row(n, i)) : row(n, i);
    const { score, index } = best(to - from, (k) => values[from + k]);
    return { box: at(n, i), score, index: index + from - shift };
  }, order, size, !isDetr);
  return [{ kind: isDetr ? "boxes and scores of classes (DETR)" : "boxes and scores of classes (SSD)", isCertain: isNamed && /score|conf|prob|logit|class/i.test(plane.name), orders: ordersOf(box.name, isDetr), read }];
}

// The order of the numbers of a box that is likely comes first.
function ordersOf(name, isDetr) {
  const first = isDetr ? "centre and size" : /detection_boxes/.test(name) ? "y0 x0 y1 x1" : "x0 y0 x1 y1";
  return [first, ...Object.keys(ORDERS).filter((order) => order !== first)];
}

// The ways to read boxes from outputs: { kind, isCertain, orders, read(n, order) }, the likely one first. `size` is that of the
// pictures that were sent, `names` are of the classes or null.
export function headsOf(outputs, size, names = null) {
  const usable = outputs.filter((t) => Array.isArray(t.data)).map((t) => ({ ...t, flat: t.data.flat(Infinity) }));
  // Of masks: as many planes as each box has numbers at its end.
  const prototypes = usable.find((t) => isFloat(t) && t.shape.length === 4 && usable.some(({ shape }) => shape.length === 3 && Math.min(shape[1], shape[2]) >= t.shape[1] + 5));
  const rows = [...usable.flatMap((t) => rowsHeads(t, size)), ...usable.flatMap((t) => grids(t, size, names))];
  const found = [...separate(usable, size, names), ...rows.map((head) => ({ ...head, prototypes }))];
  return [...found.filter((head) => head.isCertain), ...found.filter((head) => !head.isCertain)];
}
