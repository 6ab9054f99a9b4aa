// Text of a form to the JSON of a tensor, and a tensor to rows for a table. Numbers stay the text that was typed.

const INTEGER = /^[+-]?\d+$/;
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$/;
const MAX_SHOWN = 2000;

export const isNumber = (text) => NUMBER.test(text.trim());

// Whether the elements of a tensor are of floating point: FP16, FP32, FP64 or BF16.
export const isFloat = ({ datatype }) => /FP|BF/.test(datatype);

export const size = (shape) => shape.reduce((product, n) => product * n, 1);

// The shape of nested lists. Throws an Error if they are ragged.
function shapeOf(value) {
  if (!Array.isArray(value)) return [];
  const shapes = value.map(shapeOf);
  const [first = []] = shapes;
  if (shapes.some((shape) => shape.join() !== first.join())) throw new Error("the lists differ in length");
  return [value.length, ...first];
}

// An error with the place of a wrong value: { row } or { isShape }.
export const wrongAt = (message, place) => Object.assign(new Error(message), place);

// An element as JSON. Throws an Error if it is none of the datatype.
export function elementText(text, datatype) {
  const trimmed = text.trim();
  if (datatype === "BYTES") return JSON.stringify(text);
  if (datatype === "BOOL") {
    const word = { true: "true", 1: "true", false: "false", 0: "false" }[trimmed.toLowerCase()];
    if (word) return word;
  } else if (/^(U?INT)/.test(datatype)) {
    const whole = INTEGER.test(trimmed) && BigInt(trimmed.replace("+", ""));
    if (whole !== false && BigInt[datatype.startsWith("U") ? "asUintN" : "asIntN"](/\d+/.exec(datatype)[0], whole) === whole) return String(whole);
  } else {
    if (/^nan$/i.test(trimmed)) return "null";
    if (NUMBER.test(trimmed)) return plainNumber(trimmed);
  }
  // A column of a table that was true and false in training is one of numbers for the model.
  if (datatype !== "BOOL" && /^(true|false)$/i.test(trimmed)) return trimmed.toLowerCase() === "true" ? "1" : "0";
  throw new Error(`expected ${datatype}, got '${trimmed.slice(0, 40)}'`);
}

// JSON has no `+1`, `.5`, `1.` and `01`.
function plainNumber(text) {
  const [, sign, whole, rest = ""] = /^([+-]?)(\d*)(.*)$/.exec(text);
  const digits = whole.replace(/^0+(?=\d)/, "") || "0";
  return `${sign === "-" ? "-" : ""}${digits}${rest.replace(/^\.(?=$|[eE])/, "")}`;
}

// Rows of cells of CSV, tab-separated values or values with spaces between them. Cells in quotation marks may hold
// anything; with semicolons between cells, a comma is part of one.
export function parseTable(text) {
  const plain = text.replace(/"(?:[^"]|"")*"/g, "");
  const delimiter = ["\t", ";", ","].find((candidate) => plain.includes(candidate)) ?? " ";
  const rows = [[]];
  let [value, isQuoted, wasQuoted] = ["", false, false];
  const endCell = () => {
    rows.at(-1).push(wasQuoted ? value : value.trim());
    [value, wasQuoted] = ["", false];
  };
  for (let i = 0; i < text.length; i++) {
    const c = text[i];
    if (isQuoted) {
      if (c !== '"') value += c;
      else if (text[i + 1] === '"') value += text[++i];
      else isQuoted = false;
    } else if (c === '"' && value.trim() === "" && !wasQuoted) [value, isQuoted, wasQuoted] = ["", true, true];
    else if (c === delimiter) endCell();
    else if (c === "\n") endCell(), rows.push([]);
    else if (c !== "\r" && !(wasQuoted && c === " ")) value += c;
  }
  endCell();
  const cells = delimiter === " " ? rows.map((row) => row.filter((cell) => cell !== "")) : rows;
  return cells.filter((row) => row.some((cell) => cell !== ""));
}

export const isName = (cell) => !isNumber(cell) && !/^(nan|true|false)$/i.test(cell.trim());

// The columns of a table whose first line has their names: cells by name, one a line. Throws an Error.
export function parseColumns(text) {
  const [names = [], ...rows] = parseTable(text.trim());
  if (rows.length === 0) throw new Error("expected a line of names and a line of values or more");
  const wrong = rows.findIndex((row) => row.length !== names.length);
  if (wrong >= 0) throw new Error(`expected ${names.length} cells a line as in the first, got ${rows[wrong].length} in line ${wrong + 2}`);
  return new Map(names.map((name, i) => [name, rows.map((row) => row[i])]));
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
  if (datatype === "BYTES" && rank !== 2) {
    const lines = trimmed.split(/\r?\n/).filter((line) => line.trim() !== "");
    return { data: `[${lines.map((line) => JSON.stringify(line)).join(", ")}]`, shape: [lines.length], skipped: false };
  }
  let rows = parseTable(trimmed);
  const skipped = datatype !== "BYTES" && rows.length > 1 && rows[0].every(isName);
  if (skipped) rows = rows.slice(1);
  if (rows.some((row) => row.length !== rows[0].length)) throw new Error("the rows differ in length");
  const element = (cell, i, j) => {
    try {
      return elementText(cell, datatype);
    } catch (error) {
      throw new Error(`row ${i + 1}${rows[i].length > 1 ? `, value ${j + 1}` : ""}: ${error.message}`);
    }
  };
  const data = `[${rows.map((row, i) => row.map((cell, j) => element(cell, i, j)).join(", ")).join(", ")}]`;
  const [count, width] = [rows.length, rows[0].length];
  const shape = rank === 2 ? [count, width] : [count * width];
  return { data, shape: rank === 0 && count * width === 1 ? [] : shape, skipped };
}

// The shape to send: the one that was typed, else the declared one with free axes from the values.
export function chooseShape(typed, declared, found) {
  const sides = typed.split(/[,\s×x]+/).filter(Boolean);
  if (sides.some((n) => !/^\d+$/.test(n))) throw wrongAt(`expected a shape such as 2, 3, got '${typed}'`, { isShape: true });
  if (sides.length > 0) return sides.map(Number);
  if (!declared || declared.length === found.length) return found;
  const free = declared.filter((n) => n < 0).length;
  const fixed = size(declared.map((n) => (n < 0 ? 1 : n)));
  const total = size(found);
  if (free === 0 && total === fixed) return declared;
  if (free === 1 && fixed > 0 && total % fixed === 0) return declared.map((n) => (n < 0 ? total / fixed : n));
  throw new Error(`expected shape [${declared.join(", ")}], got [${found.join(", ")}]: type the shape`);
}

// The body of a request and its headers. `inputs`: { name, datatype, shape } with the JSON of their elements as `data`,
// or with `bytes`, which follow the JSON.
export function requestBody(inputs, outputs = []) {
  const parts = inputs.map(({ name, datatype, shape, data, bytes }) => {
    const content = bytes ? `"parameters": {"binary_data_size": ${bytes.byteLength}}` : `"data": ${data}`;
    return `{"name": ${JSON.stringify(name)}, "datatype": "${datatype}", "shape": ${JSON.stringify(shape)}, ${content}}`;
  });
  const requested = outputs.length > 0 ? `, "outputs": ${JSON.stringify(outputs.map((name) => ({ name })))}` : "";
  const text = `{"inputs": [${parts.join(", ")}]${requested}}`;
  const binary = inputs.filter(({ bytes }) => bytes).map(({ bytes }) => bytes);
  if (binary.length === 0) return { body: text, headers: {} };
  const json = new TextEncoder().encode(text);
  const headers = { "content-type": "application/octet-stream", "inference-header-content-length": String(json.length) };
  return { body: new Blob([json, ...binary]), headers };
}

// Rows of a tensor of at most two axes, cut to what a page can show; null for more axes.
export function rowsOf({ shape, data }) {
  if (shape.length > 2 || !Array.isArray(data)) return null;
  const flat = data.flat(Infinity);
  const width = shape.length === 2 ? shape[1] : 1;
  const count = Math.min(shape.length === 0 ? 1 : shape[0], Math.max(1, Math.floor(MAX_SHOWN / Math.max(width, 1))));
  return Array.from({ length: count }, (_, i) => flat.slice(i * width, (i + 1) * width));
}

export const show = (value) => (value === null ? "NaN" : Object.is(value, -0) ? "-0" : String(value));
