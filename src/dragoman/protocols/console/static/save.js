// Values of a tensor out of the page: to the clipboard or as a file.
import { CopyButton } from "./copy.js";
import { html } from "./html.js";
import { isNumber, show } from "./tensors.js";

const KEEP_MS = 60_000; // until the browser has the file

export function saveFile(name, content, type = "") {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name.replace(/[^\w.-]+/g, "_");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), KEEP_MS);
}

// Texts that a spreadsheet would run as a formula begin with an apostrophe, which it does not show.
const inert = (value) => (typeof value === "string" && /^[=+\-@\t\r]/.test(value) && !isNumber(value) ? `'${value}` : value);
const quoted = (text, delimiter) => (/["\r\n]/.test(text) || text.includes(delimiter) ? `"${text.replaceAll('"', '""')}"` : text);

// The elements as lines with one row each: the last axis has the columns. One axis is a column.
export function delimited({ shape, data }, delimiter = ",", header = null) {
  const flat = data.flat(Infinity);
  const width = shape.length > 1 ? shape.at(-1) : 1;
  const rows = Array.from({ length: width ? flat.length / width : 0 }, (_, i) => flat.slice(i * width, (i + 1) * width));
  const lines = header?.length === width ? [header, ...rows] : rows;
  return lines.map((row) => row.map((v) => quoted(show(inert(v)), delimiter)).join(delimiter)).join("\n");
}

// A tensor as JSON. Integers beyond 2^53 stay as they are.
export function tensorJson({ name, datatype, shape, data }) {
  const elements = data.flat(Infinity).map((v) => (typeof v === "number" || typeof v === "bigint" ? show(v) : JSON.stringify(v)));
  return `{"name": ${JSON.stringify(name)}, "datatype": ${JSON.stringify(datatype)}, "shape": ${JSON.stringify(shape)}, "data": [${elements.join(", ")}]}\n`;
}

// Buttons that copy and save all elements of a tensor as the server sent them.
export function Save({ tensor, header = null }) {
  return html`<p class="row save"><${CopyButton} text=${() => delimited(tensor, "\t", header)} kind="small" />
    <button class="small" onClick=${() => saveFile(`${tensor.name}.csv`, `${delimited(tensor, ",", header)}\n`, "text/csv")}>CSV</button>
    <button class="small" onClick=${() => saveFile(`${tensor.name}.json`, tensorJson(tensor), "application/json")}>JSON</button></p>`;
}
