// What an output means, as far as its numbers, shape, names and labels tell: scores of classes, or a class.
import { isFloat } from "./tensors.js";

const MIN_CLASSES = 2;
const IMAGENET = [1000, 1001];
const SCORE_NAME = /prob|score|logit|softmax|class|label/i;
const CLASS_NAME = /class|label|argmax|categor|predict/i;

const isNumber = (v) => typeof v === "number" || v === null; // null is NaN

export const softmax = (row) => {
  const most = row.reduce((a, v) => Math.max(a, v ?? NaN), -Infinity);
  if (!Number.isFinite(most)) return row.map(() => null); // NaN and infinities have none
  const powers = row.map((v) => Math.exp(v - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((v) => v / sum);
};

const isProbability = (row, tolerance) =>
  row.every((v) => v !== null && v >= 0 && v <= 1 + tolerance) && Math.abs(row.reduce((a, b) => a + b, 0) - 1) <= tolerance;

// The axis of the classes without axes of length 1 at the end or in the middle: [n, c, 1, 1] and [n, 1, c] are [n, c].
function classShape(shape, declared) {
  if (shape.length === 1) return declared?.length === 1 && declared[0] < 0 ? null : [1, shape[0]];
  const rest = shape.slice(1).filter((n) => n !== 1);
  return rest.length === 1 ? [shape[0], rest[0]] : null;
}

// The scores of classes in a tensor, a row for each item: { rows, isProbability, isCertain }; null if it has none.
// `names` are those of the classes or null, `declared` is the shape in the metadata or undefined.
export function scoresOf({ name, datatype, shape, data }, { names = null, declared, hasPhoto = false } = {}) {
  const found = isFloat({ datatype }) ? classShape(shape, declared) : null;
  if (!found || found[1] < MIN_CLASSES || found[0] === 0) return null;
  const flat = data?.flat(Infinity) ?? [];
  if (flat.length !== found[0] * found[1] || !flat.every(isNumber)) return null;
  const rows = Array.from({ length: found[0] }, (_, i) => flat.slice(i * found[1], (i + 1) * found[1]));
  const tolerance = /16/.test(datatype) ? 1e-2 : 1e-3;
  const areProbabilities = rows.every((row) => isProbability(row, tolerance));
  const isCertain = areProbabilities || names?.length === found[1] || SCORE_NAME.test(name) || (hasPhoto && IMAGENET.includes(found[1]));
  return { rows, isProbability: areProbabilities, isCertain };
}

// The names of the classes whose indices a tensor holds, one an element; null if it does not hold such indices.
// `isLabelled` says that the names were given for this output, not for another one.
export function classesOf({ name, datatype, shape, data }, { names = null, isLabelled = false } = {}) {
  if (isFloat({ datatype }) && shape.at(-1) === names?.length) return null; // a score of each class
  if (!names || !(isLabelled || CLASS_NAME.test(name)) || shape.filter((n) => n !== 1).length > 1) return null;
  const found = (data ?? []).flat(Infinity).map((v) => (v === null || typeof v === "string" ? undefined : names[Number(v)]));
  return found.length > 0 && found.every((text) => text !== undefined) ? found : null;
}

// The indices of the largest values, the largest first; NaN comes last.
export const ranked = (row, count = row.length) =>
  row.map((_, i) => i).sort((a, b) => (row[b] ?? -Infinity) - (row[a] ?? -Infinity) || a - b).slice(0, count);

// A probability with three digits, as percent.
export function percent(p) {
  const value = 100 * p;
  if (p === null || Number.isNaN(value)) return "NaN";
  if (value > 0 && value < 0.001) return "< 0.001 %";
  if (value >= 99.995 && value < 100) return "> 99.99 %";
  return `${value >= 99.95 && value < 100 ? value.toFixed(2) : value === 0 || value >= 100 ? Math.round(value) : value.toPrecision(3)} %`;
}
