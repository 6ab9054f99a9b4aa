// A form made from a model's signature: numbers and text that are typed, pasted or dropped as files, and pictures.
import { call, modelPath, roundsIntegers } from "./api.js";
import { firstMost, firstRate, isRate, readSound, Recorder, Sound, soundTensor, takesSound } from "./audio.js";
import { useDrop } from "./drop.js";
import { Examples } from "./examples.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { ARRAYS, fileTensor, pictureTensor } from "./images.js";
import { Outputs } from "./outputs.js";
import { Photos } from "./photo_input.js";
import { drawPhoto, firstSettings, readPhoto } from "./photos.js";
import { placeholderOf, sampleRequest, samplesOf, shortSample, specsOf } from "./samples.js";
import { areColumns, cellsOf, columnTensor, INVALID, TableInput } from "./table_input.js";
import { chooseShape, parseColumns, parseValues, requestBody, rowsOf, show } from "./tensors.js";

// What the server says of an input, and perhaps of one of its elements.
const OF_INPUT = /^input '(.+?)': (?:data\[(\d+)\])?/;

// Rows a line, so that a table can be edited and pasted.
function initialText(example) {
  if (!example) return "";
  const rows = rowsOf(example);
  return rows ? rows.map((row) => row.map(show).join(", ")).join("\n") : JSON.stringify(example.data);
}

// The shape of the example where the values alone do not show it, as text.
function exampleShape({ shape }, found) {
  return found && shape.filter((n) => n < 0).length > 1 ? found.join(", ") : "";
}

function initialFields(model) {
  const { metadata, example, shapes, examples: shipped } = model;
  const examples = new Map((example?.inputs ?? []).map((tensor) => [tensor.name, tensor]));
  const samples = samplesOf(shipped);
  const isKnown = ({ name }) => examples.has(name) || samples.has(name);
  return specsOf(metadata.inputs, samples).map((spec) => withKind({ ...spec, anyRank: spec.parameters?.any_rank === true }, model)).map((spec) => ({
    ...spec,
    isOptional: examples.size + samples.size > 0 && !isKnown(spec),
    text: initialText(examples.get(spec.name) ?? shortSample(samples.get(spec.name))),
    typedShape: exampleShape(spec, examples.get(spec.name)?.shape ?? samples.get(spec.name)?.shape ?? shapes[spec.name]),
    isSent: isKnown(spec) || examples.size + samples.size === 0,
    sample: samples.get(spec.name) ?? null, // is sent if nothing is typed or chosen
    cells: cellsOf(examples.get(spec.name) ?? shortSample(samples.get(spec.name))), // of a column, in a table of all inputs
    pictures: [], // photos from files, instead of the text
    file: null, // of a BYTES input, instead of the text
    sound: null, // from a file or the microphone, instead of the text
    settings: spec.isPhoto ? firstSettings(model.pictures[spec.name]) : null,
    problem: "",
  }));
}

function withKind(spec, model) {
  const isPhoto = Boolean(model.pictures[spec.name] && ARRAYS[spec.datatype]); // some browsers have no FP16
  return { ...spec, isPhoto, takesSound: isPhoto ? "" : takesSound(spec, model) };
}

// Text may hold anything, also what separates the cells of a table.
function columnText(cells, { datatype, shape }) {
  if (datatype !== "BYTES") return cells.join("\n");
  return JSON.stringify(shape.length === 2 ? cells.map((cell) => [cell]) : cells);
}

// The values that a field gets from files: text of a table, pictures, or bytes. Throws an Error.
async function readFiles(field, files, { rate, most }) {
  if (field.isPhoto && files.every((file) => file.type.startsWith("image/"))) {
    return { pictures: await Promise.all(files.map(readPhoto)), file: null };
  }
  if (files.length > 1) throw new Error(`expected one file, got ${files.length}`);
  const [file] = files;
  if (field.takesSound && (/^(audio|video)\//.test(file.type) || file.name === "recording")) return { sound: await readSound(file, rate, most) };
  if (/^text\/|json$/.test(file.type) || /\.(csv|tsv|txt|json)$/i.test(file.name)) {
    return { text: await file.text(), pictures: [], file: null, sound: null, isRead: true };
  }
  if (field.datatype !== "BYTES") throw new Error(`expected a table${field.isPhoto ? " or a picture" : field.takesSound ? " or a sound" : ""}, got '${file.name}'`);
  return { file: { name: file.name, bytes: await file.arrayBuffer() }, pictures: [] };
}

// The tensor of a field, a note for the reader or "", and the pictures in it.
function toTensor(field) {
  const { name, datatype } = field;
  if (field.pictures.length > 0) {
    const sent = field.pictures.map((photo) => drawPhoto(photo, field, field.settings));
    return [{ name, datatype, ...pictureTensor(sent, field, field.settings) }, "", sent];
  }
  if (field.sound) return [{ name, datatype, ...soundTensor(field.sound, field) }, ""];
  if (field.file) return [{ name, datatype, ...fileTensor(field.file.bytes, field) }, ""];
  if (field.sample && field.text.trim() === "") {
    return [sampleRequest(field.sample), `${name}: the example of ${field.sample.shape.join(" x ")} was sent`];
  }
  const { data, shape, skipped } = parseValues(field.text, datatype, field.anyRank ? 1 : field.shape.length);
  const sent = chooseShape(field.typedShape, field.anyRank ? null : field.shape, shape);
  return [{ name, datatype, shape: sent, data }, skipped ? `${name}: the first line, of names, was not sent` : ""];
}

function Text({ field, id, wrong, onChange }) {
  return html`<label for=${id}>values: rows of a table, or JSON</label>
    <textarea id=${id} rows=${field.shape.length === 0 ? 1 : 4} spellcheck=${false} value=${field.text} placeholder=${placeholderOf(field.sample)} onInput=${(e) => onChange({ text: e.target.value })}
      ...${wrong?.field === field && !wrong.isShape && INVALID}></textarea>
    <label class="inline">shape <input size="12" placeholder="from the values" value=${field.typedShape}
      onInput=${(e) => onChange({ typedShape: e.target.value })} ...${wrong?.field === field && wrong.isShape && INVALID} /></label>`;
}

function Values({ field, onChange, ...rest }) {
  const { pictures, file } = field;
  const drop = html`<button type="button" onClick=${() => onChange({ pictures: [], file: null, sound: null })}>Remove</button>`;
  if (field.sound) return html`<${Sound} field=${field} onChange=${onChange} /><p class="row">${drop}</p>`;
  if (file) return html`<p class="row">${file.name}, ${file.bytes.byteLength} bytes ${drop}</p>`;
  if (pictures.length > 0) return html`<${Photos} field=${field} onChange=${onChange} /><p class="row">${drop}</p>`;
  if (!field.isPhoto) return html`<${Text} field=${field} onChange=${onChange} ...${rest} />`;
  return html`<details open=${field.isRead}><summary>Numbers instead of a picture</summary><${Text} field=${field} onChange=${onChange} ...${rest} /></details>`;
}

function Field({ field, sounds, onChange, ...rest }) {
  async function use(files) {
    try {
      onChange({ ...(await readFiles(field, [...files], sounds)), problem: "" });
    } catch (error) {
      onChange({ problem: error.message });
    }
  }
  const paste = (event) => event.clipboardData?.files.length > 0 && (event.preventDefault(), use(event.clipboardData.files));
  const isEmptyPhoto = field.isPhoto && field.pictures.length === 0;
  const kinds = field.takesSound === "yes" ? "A sound or a table" : field.datatype === "BYTES" ? "A file" : "A table";
  const invitation = isEmptyPhoto ? "Drop a picture here, paste it, or choose a file" : field.isPhoto ? "Other pictures" : `${kinds} from disk, or drop here`;
  const chooser = html`<div class="row"><label class=${isEmptyPhoto ? "file drop" : "file"}>${invitation} <input type="file" multiple=${field.isPhoto}
    onChange=${(e) => e.target.files.length > 0 && use(e.target.files)} /></label>
    ${field.takesSound === "yes" && html`<${Recorder} onFile=${(file) => use([file])} onProblem=${(problem) => onChange({ problem })} />`}</div>`;
  return html`<fieldset ...${useDrop(use)} onPaste=${paste}>
    <legend>${field.name} <small>${field.datatype} ${field.anyRank ? "any shape" : `[${field.shape.join(", ")}]`}</small></legend>
    ${field.isOptional && html`<label class="inline"><input type="checkbox" checked=${field.isSent}
      onChange=${(e) => onChange({ isSent: e.target.checked })} /> send this optional input</label>`}
    ${field.isSent && (isEmptyPhoto
      ? html`${chooser}<${Values} field=${field} onChange=${onChange} ...${rest} />`
      : html`<${Values} field=${field} onChange=${onChange} ...${rest} />${chooser}`)}
    ${field.problem && html`<p class="error" role="alert">${field.problem}</p>`}
  </fieldset>`;
}

// Fill several inputs at once from a table with their names in its first line.
function Columns({ fields, onColumns }) {
  const [message, setMessage] = useState("");
  const fill = (event) => {
    try {
      const columns = parseColumns(event.target.value);
      const known = fields.filter((field) => columns.has(field.name)).map((field) => field.name);
      const unknown = [...columns.keys()].filter((name) => !known.includes(name));
      onColumns(columns);
      setMessage(`Filled ${known.join(", ") || "no input"}.${unknown.length > 0 ? ` No input has the name ${unknown.join(", ")}.` : ""}`);
    } catch (error) {
      setMessage(event.target.value.trim() && error.message);
    }
  };
  return html`<details><summary>Fill all inputs from a table</summary>
    <label for="columns">CSV with the names of the inputs in the first line</label>
    <textarea id="columns" rows="4" spellcheck=${false} onInput=${fill}></textarea>
    <p class="note" role="status">${message}</p></details>`;
}

export function TryIt({ name, version, model }) {
  const [fields, setFields] = useState(() => initialFields(model));
  const [answer, setAnswer] = useState(null);
  const [problem, setProblem] = useState(null); // { message }, and where it is: the field with a row or { isShape }
  const [busy, setBusy] = useState(false);
  const form = useRef(null);
  useEffect(() => form.current?.querySelector("[aria-invalid]")?.focus(), [problem]);
  // A model that has an input for the rate of a sound gets the rate of the one that is sent.
  const change = (index, values) => setFields((now) => now.map((field, i) => {
    if (i === index) return { ...field, ...values };
    return values.sound && isRate(field) ? { ...field, text: String(values.sound.rate) } : field;
  }));
  const sounds = { rate: firstRate(fields.find(isRate)?.text), most: firstMost(fields) };
  const [isTable, setIsTable] = useState(() => areColumns(fields, model));
  const separate = () => {
    setFields(fields.map((field) => ({ ...field, text: field.cells.join("") ? columnText(field.cells, field) : "" })));
    setIsTable(false);
  };

  function compose() {
    const found = fields.filter((field) => field.isSent).map((field) => {
      try {
        return isTable ? [columnTensor(field), ""] : toTensor(field);
      } catch (error) {
        throw Object.assign(error, { message: `${field.name}: ${error.message}`, field });
      }
    });
    return { ...requestBody(found.map(([tensor]) => tensor), model.outputs), notes: found.map(([, note]) => note).filter(Boolean), sent: found.find(([, , sent]) => sent)?.[2] ?? [], rate: fields.find((field) => field.sound)?.sound.rate };
  }

  async function submit(event) {
    event.preventDefault();
    if (busy) return;
    setBusy(true);
    try {
      const { body, headers, notes, ...sent } = compose();
      setAnswer({ ...(await call(`${modelPath(name, version)}/infer`, { method: "POST", body, headers })), notes, ...sent });
      setProblem(null);
    } catch (error) {
      const [, input, element] = OF_INPUT.exec(error.message) ?? [];
      setAnswer(null);
      setProblem({ row: Number(element), field: fields.find(({ name: each }) => each === input), ...error, message: error.message });
    }
    setBusy(false);
  }

  if (fields.length === 0) {
    return html`<p class="note">The model does not declare its inputs. See Code for a request to start from.</p>`;
  }
  const useColumns = (columns) => setFields(fields.map((field) => {
    const cells = columns.get(field.name);
    return cells ? { ...field, text: columnText(cells, field), typedShape: "", isSent: true, pictures: [], file: null, sound: null } : field;
  }));
  const isWide = !isTable && fields.some((field) => field.isPhoto || field.takesSound === "yes"); // beside each other: what is sent, and what comes back
  return html`<div class=${isWide ? "beside" : ""}><form ref=${form} onSubmit=${submit}>
      <${Examples} model=${model} fieldsOf=${initialFields} onFields=${(filled) => (setFields(filled), setAnswer(null), setProblem(null))} />
      ${isTable && html`<${TableInput} fields=${fields} wrong=${problem} onFields=${setFields} onSeparate=${separate} />`}
      ${!isTable && fields.length > 1 && html`<${Columns} fields=${fields} onColumns=${useColumns} />`}
      ${!isTable && fields.map((field, i) => html`<${Field} key=${field.name} field=${field} id=${`data-${i}`} wrong=${problem} sounds=${sounds} onChange=${(values) => change(i, values)} />`)}
      <button class="primary" aria-disabled=${busy}>${busy ? "Running …" : "Run"}</button>
    </form>
    <div aria-live="polite">
      ${problem && html`<p class="error" role="alert" id="problem">${problem.message}</p>`}
      ${answer?.notes.map((text) => html`<p class="note">${text}</p>`)}
      ${answer && html`<p class="note">${answer.ms.toFixed(1)} ms, request <a href=${`#/requests/${encodeURIComponent(answer.id)}`}><code>${answer.id}</code></a></p>
        ${roundsIntegers && html`<p class="error">This browser rounds integers beyond 2^53.</p>`}
        <${Outputs} key=${answer.id} outputs=${answer.data.outputs} model=${model} sent=${answer.sent} rate=${answer.rate} />`}
    </div></div>`;
}
