// One table for a model whose inputs are its columns: cells that are typed or pasted, and files of CSV.
import { isCalledSound } from "./audio.js";
import { useDrop } from "./drop.js";
import { html, useState } from "./html.js";
import { elementText, isFloat, isName, parseTable, show, wrongAt } from "./tensors.js";
import { plural } from "./words.js";

const MAX_SHOWN = 100; // rows
// Attributes of an element with a wrong value.
export const INVALID = { "aria-invalid": "true", "aria-describedby": "problem" };

const isColumn = ({ shape, isPhoto, anyRank }) => !isPhoto && !anyRank && shape[0] === -1 && (shape.length === 1 || (shape.length === 2 && shape[1] === 1));

// Texts alone may be long, and have fields of their own.
export const areColumns = (fields, model) =>
  fields.length > 1 && fields.every((field) => isColumn(field) && !isCalledSound(field, model)) && fields.some(({ datatype }) => datatype !== "BYTES");

// The cells of a field, as text: of the example, or one that is empty.
export function cellsOf(example) {
  const cells = Array.isArray(example?.data) ? example.data.flat(Infinity).map((value) => (value === null ? "" : show(value))) : [];
  return cells.length > 0 ? cells : [""];
}

// The tensor of a column. Throws an Error that names the row, and has its index as `row`.
export function columnTensor({ name, datatype, shape, cells }) {
  const data = cells.map((cell, i) => {
    if (cell.trim() === "" && isFloat({ datatype })) return "null"; // as NaN
    try {
      if (cell.trim() === "" && datatype !== "BYTES") throw new Error(`expected ${datatype}, got no value`);
      return elementText(cell, datatype);
    } catch (error) {
      throw wrongAt(`row ${i + 1}: ${error.message}`, { row: i });
    }
  });
  return { name, datatype, shape: shape.length === 2 ? [cells.length, 1] : [cells.length], data: `[${data.join(", ")}]` };
}

// The columns of a text by name, and what is to be said. Lines without names have the inputs in their order. Throws an Error.
export function readColumns(text, fields) {
  const rows = parseTable(text.replace(/^\ufeff/, "").trim());
  const names = fields.map(({ name }) => name);
  const [first = []] = rows;
  const hasHeader = first.some((cell) => names.includes(cell)) || (rows.length > 1 && first.every(isName) && first.length !== names.length);
  const header = hasHeader ? first : names;
  const lines = hasHeader ? rows.slice(1) : rows;
  const wrong = lines.findIndex((row) => row.length !== header.length);
  if (lines.length === 0) throw new Error("expected a line of names and a line of values or more");
  if (wrong >= 0) throw new Error(`expected ${header.length} cells a line, got ${lines[wrong].length} in line ${wrong + 1 + hasHeader}`);
  const missing = fields.filter(({ name, isOptional }) => !isOptional && !header.includes(name)).map(({ name }) => name);
  if (missing.length > 0) throw new Error(`there is no column ${missing.join(", ")}; the first line has ${header.join(", ")}`);
  const others = header.filter((name) => !names.includes(name));
  const count = plural(lines.length, "row");
  return {
    columns: new Map(header.map((name, i) => [name, lines.map((row) => row[i])])),
    message: others.length > 0 ? `${count}; left out, since no input has the name: ${others.join(", ")}` : count,
  };
}

// `wrong`: the field and the row of a wrong value, or null. It is shown if its row is further down.
function Rows({ fields, wrong, onCells, onPaste }) {
  const count = fields[0].cells.length;
  const edit = (field, row, text) => onCells(field.name, field.cells.map((cell, i) => (i === row ? text : cell)));
  const shown = Array.from({ length: Math.min(count, MAX_SHOWN) }, (_, i) => i);
  if (wrong?.row >= MAX_SHOWN) shown.push(wrong.row);
  return html`<div class="cells" tabindex="0" role="group" aria-label="Rows of the inputs"><table>
    <thead><tr>${fields.map(({ name, datatype }) => html`<th scope="col">${name}<small>${datatype === "BYTES" ? "text" : datatype}</small></th>`)}</tr></thead>
    <tbody>${shown.map((row) => html`<tr key=${row}>${fields.map((field) => html`<td><input aria-label=${`${field.name}, row ${row + 1}`} value=${field.cells[row]}
      inputmode=${field.datatype === "BYTES" ? "text" : "decimal"} spellcheck=${false} autocomplete="off"
      onInput=${(e) => edit(field, row, e.target.value)} onPaste=${onPaste}
      ...${wrong?.field === field && wrong.row === row && INVALID} /></td>`)}</tr>`)}</tbody></table></div>
    ${count > shown.length && html`<p class="note">${count - shown.length} more rows are sent, and not shown.</p>`}`;
}

export function TableInput({ fields, wrong, onFields, onSeparate }) {
  const [message, setMessage] = useState("");
  const [problem, setProblem] = useState("");
  const used = fields.filter(({ isSent }) => isSent);
  const count = used[0]?.cells.length ?? 0;
  const change = (cells) => onFields(fields.map((field) => ({ ...field, cells: cells(field) })));
  function load(text, from) {
    try {
      const { columns, message: found } = readColumns(text, fields);
      onFields(fields.map((field) => ({ ...field, isSent: columns.has(field.name), cells: columns.get(field.name) ?? field.cells })));
      setMessage(`${from}: ${found}`);
      setProblem("");
    } catch (error) {
      setMessage("");
      setProblem(`${from}: ${error.message}`);
    }
  }
  const use = async ([file]) => {
    const text = await file.text();
    if (text.includes("\0") || file.type.startsWith("image/")) setProblem(`'${file.name}' is not a table: expected CSV`), setMessage("");
    else load(text, file.name);
  };
  const paste = (event) => {
    const text = event.clipboardData?.getData("text") ?? "";
    if (event.clipboardData?.files.length > 0) event.preventDefault(), use(event.clipboardData.files);
    else if (/[\n\t]/.test(text.trim())) event.preventDefault(), load(text, "what was pasted");
  };
  const add = () => change(({ cells }) => [...cells, cells.at(-1) ?? ""]);
  return html`<fieldset ...${useDrop(use)}>
    <legend>Rows</legend>
    <${Rows} fields=${used} wrong=${wrong} onPaste=${paste} onCells=${(name, cells) => onFields(fields.map((field) => (field.name === name ? { ...field, cells } : field)))} />
    <div class="row"><button type="button" onClick=${add}>Add a row</button>
      <button type="button" disabled=${count < 2} onClick=${() => change(({ cells }) => cells.slice(0, -1))}>Remove the last</button>
      <label class="file">CSV with these columns: drop it here, paste it into a cell, or choose a file
        <input type="file" accept=".csv,.tsv,.txt,text/csv" onChange=${(e) => e.target.files.length > 0 && use(e.target.files)} /></label>
      <button type="button" onClick=${onSeparate}>A field for each input</button></div>
    ${fields.filter(({ isOptional }) => isOptional).map(({ name, isSent }) => html`<label class="inline"><input type="checkbox" checked=${isSent}
      onChange=${(e) => onFields(fields.map((field) => (field.name === name ? { ...field, isSent: e.target.checked, cells: Array(count).fill("") } : field)))} /> send the optional ${name}</label>`)}
    <p class="note" role="status">${message}</p>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
  </fieldset>`;
}
