// Text of a form to the JSON of a tensor, and a tensor to rows for a table. Numbers stay the text that was typed.

const INTEGER = /^[+-]?\d+$/;
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$/;
const MAX_SHOWN = 2000;

export const size = (shape) => shape.reduce((product, n) => product * n, 1);

// The shape of nested lists. Throws an Error if they are ragged.
function shapeOf(value) {
  if (!Array.isArray(value)) return [];
  const shapes = value.map(shapeOf);
  const [first = []] = shapes;
  if (shapes.some((shape) => shape.join() !== first.join())) throw new Error("the lists differ in length");
  return [value.length, ...first];
}

function element(text, datatype) {
  const trimmed = text.trim();
  if (datatype === "BYTES") return JSON.stringify(trimmed.replace(/^"(.*)"$/s, "$1").replaceAll('""', '"'));
  if (datatype === "BOOL") {
    const word = { true: "true", 1: "true", false: "false", 0: "false" }[trimmed.toLowerCase()];
    if (word) return word;
  } else if (/^(U?INT)/.test(datatype)) {
    if (INTEGER.test(trimmed)) return trimmed.replace(/^\+/, "").replace(/^(-?)0+(?=\d)/, "$1");
  } else {
    if (/^nan$/i.test(trimmed)) return "null";
    if (NUMBER.test(trimmed)) return plainNumber(trimmed);
  }
  throw new Error(`expected ${datatype}, got '${trimmed.slice(0, 40)}'`);
}

// JSON has no `+1`, `.5`, `1.` and `01`.
function plainNumber(text) {
  const [, sign, whole, rest = ""] = /^([+-]?)(\d*)(.*)$/.exec(text);
  const digits = whole.replace(/^0+(?=\d)/, "") || "0";
  return `${sign === "-" ? "-" : ""}${digits}${rest.replace(/^\.(?=$|[eE])/, "")}`;
}

function cells(line) {
  if (line.includes("\t")) return line.split("\t");
  if (/[,;]/.test(line)) return line.match(/("([^"]|"")*"|[^,;]*)(?=[,;]|$)[,;]?/g).filter((c, i, all) => c || i < all.length - 1).map((c) => c.replace(/[,;]$/, ""));
  return line.split(/\s+/);
}

// Parse what was typed or pasted: JSON lists, or a table with a row a line. For BYTES with one axis a line is an element.
// Returns the elements as JSON text, their shape, and whether a first line of names was skipped. Throws an Error.
export function parseValues(text, datatype, rank) {
  const trimmed = text.trim();
  if (trimmed.startsWith("[")) {
    const value = JSON.parse(trimmed);
    return { data: trimmed, shape: shapeOf(value), skipped: false };
  }
  if (trimmed === "") return { data: "[]", shape: rank === 2 ? [0, 0] : [0], skipped: false };
  let lines = trimmed.split(/\r?\n/).filter((line) => line.trim() !== "");
  if (datatype === "BYTES" && rank !== 2) {
    return { data: `[${lines.map((line) => JSON.stringify(line)).join(", ")}]`, shape: [lines.length], skipped: false };
  }
  let rows = lines.map((line) => cells(line.trim()));
  const isName = (cell) => !NUMBER.test(cell.trim()) && !/^(nan|true|false)$/i.test(cell.trim());
  const skipped = datatype !== "BYTES" && rows.length > 1 && rows[0].every(isName);
  if (skipped) rows = rows.slice(1);
  if (rows.some((row) => row.length !== rows[0].length)) throw new Error("the rows differ in length");
  const data = `[${rows.map((row) => row.map((cell) => element(cell, datatype)).join(", ")).join(", ")}]`;
  const [count, width] = [rows.length, rows[0].length];
  const shape = rank === 2 ? [count, width] : [count * width];
  return { data, shape: rank === 0 && count * width === 1 ? [] : shape, skipped };
}

// The shape to send: the one that was typed, else the declared one with free axes from the values.
export function chooseShape(typed, declared, found) {
  if (typed.trim() !== "") return typed.split(/[,\s×x]+/).filter(Boolean).map(Number);
  if (!declared || declared.length === found.length) return found;
  const free = declared.filter((n) => n < 0).length;
  const fixed = size(declared.map((n) => (n < 0 ? 1 : n)));
  const total = size(found);
  if (free === 0 && total === fixed) return declared;
  if (free === 1 && fixed > 0 && total % fixed === 0) return declared.map((n) => (n < 0 ? total / fixed : n));
  throw new Error(`expected shape [${declared.join(", ")}], got [${found.join(", ")}]: type the shape`);
}

// Rows of a tensor of at most two axes, cut to what a page can show; null for more axes.
export function rowsOf({ shape, data }) {
  if (shape.length > 2 || !Array.isArray(data)) return null;
  const flat = data.flat(Infinity);
  const width = shape.length === 2 ? shape[1] : 1;
  const count = Math.min(shape.length === 0 ? 1 : shape[0], Math.max(1, Math.floor(MAX_SHOWN / Math.max(width, 1))));
  return Array.from({ length: count }, (_, i) => flat.slice(i * width, (i + 1) * width));
}

export const show = (value) => (value === null ? "NaN" : typeof value === "string" ? value : String(value));
