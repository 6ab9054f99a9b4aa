// Code that calls a model, for the clients that people have; it runs as it is.
import { modelPath, root, storedKey } from "./api.js";
import { CopyButton } from "./copy.js";
import { html, useState } from "./html.js";
import { channelsOf, SCALES } from "./images.js";
import { size } from "./tensors.js";

const NUMPY = {
  BOOL: "bool", UINT8: "uint8", UINT16: "uint16", UINT32: "uint32", UINT64: "uint64", INT8: "int8", INT16: "int16",
  INT32: "int32", INT64: "int64", FP16: "float16", FP32: "float32", FP64: "float64", BYTES: "object",
};
const KEY = ' -H "authorization: Bearer $DRAGOMAN_API_KEY"';
const MAX_WRITTEN = 64; // elements of an example; of a longer one only the shape counts

export const quote = (text) => `'${text.replaceAll("'", `'"'"'`)}'`;
const word = (text) => (/^[\w:/.,%-]+$/.test(text) ? text : quote(text)); // of a shell

// JSON of a value with integers of any size.
export function json(value) {
  if (Array.isArray(value)) return `[${value.map(json).join(",")}]`;
  if (value === null || typeof value !== "object") return typeof value === "bigint" ? String(value) : JSON.stringify(value);
  return `{${Object.entries(value).map(([key, v]) => `${JSON.stringify(key)}:${json(v)}`).join(",")}}`;
}

const NAMES = { true: "True", false: "False", null: "None" };

// A value of JSON as an expression of Python.
export function python(value) {
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "string") return JSON.stringify(value);
  if (value === null || typeof value !== "object") return NAMES[value] ?? String(value);
  return `{${Object.entries(value).map(([key, v]) => `${JSON.stringify(key)}: ${python(v)}`).join(", ")}}`;
}

// NumPy's expression for a tensor; without data one of its shape.
export function array({ datatype, shape, data }) {
  const dtype = NUMPY[datatype];
  if (!dtype) return null;
  if (!data) return datatype === "BYTES" ? `np.full(${python(shape)}, b"text", object)` : `np.ones(${python(shape)}, np.${dtype})`;
  const values = datatype === "BYTES" ? `[${data.map((text) => (/^[ -~\n\r\t]*$/.test(text) ? `b${JSON.stringify(text)}` : `${JSON.stringify(text)}.encode()`)).join(", ")}]` : python(data);
  const type = dtype === "object" || dtype === "bool" ? dtype : `np.${dtype}`;
  return `np.array(${values}, ${type}).reshape(${shape.join(", ") || "()"})`;
}

// The inputs of an example, those that are long without data.
function tensorsOf({ example, metadata: { inputs = [] }, shapes }) {
  const found = example?.inputs ?? inputs.filter(({ name }) => shapes[name]).map(({ name, datatype }) => ({ name, datatype, shape: shapes[name] }));
  return found.map(({ data, ...tensor }) => (size(tensor.shape) > MAX_WRITTEN ? tensor : { ...tensor, data }));
}

const widthOf = (datatype) => ({ BYTES: 4, BOOL: 1 })[datatype] ?? /\d+/.exec(datatype)[0] / 8;

// A command that sends tensors, each on a line of its own. Those without data are sent as bytes: of a photo, or zeros.
function curl(url, header, tensors, picture) {
  const sizes = tensors.map(({ data, datatype, shape }) => (data ? 0 : widthOf(datatype) * size(shape)));
  const inputs = tensors.map((tensor, i) => `  ${json(sizes[i] ? { ...tensor, parameters: { binary_data_size: sizes[i] } } : tensor)}`);
  const text = `{"inputs": [\n${inputs.join(",\n")}]}`;
  if (!sizes.some(Boolean)) return `curl ${url}${header} -d ${quote(text)}`;
  const bytes = sizes.filter(Boolean).map((n) => (picture ? "cat photo.bin" : `head -c ${n} /dev/zero`)).join(";\n  ");
  const before = picture ? `python -c ${quote(`from dragoman.client import picture\n${picture}.tofile("photo.bin")`)}\n` : "";
  return `${before}(printf %s ${quote(text)};\n  ${bytes}) |\n  curl ${url}${header} -H "inference-header-content-length: ${new TextEncoder().encode(text).length}" --data-binary @-`;
}

const isColumn = ({ shape, parameters }) => shape[0] === -1 && (shape.length === 1 || (shape.length === 2 && shape[1] === 1)) && !parameters?.any_rank;

const isPhoto = ({ metadata: { inputs = [] }, pictures }) => inputs.length === 1 && Boolean(pictures[inputs[0].name]);

// An expression for a photo as the only input, sent as the form does at first, and its shape, null if that is the photo's;
// null for inputs of another kind.
function photo(model) {
  const [input] = model.metadata.inputs ?? [];
  if (!model.canInfer || !isPhoto(model) || !["FP32", "UINT8"].includes(input.datatype)) return null;
  if (input.shape.length !== 4 || input.shape[0] > 1) return null;
  const settings = model.pictures[input.name];
  const { layout, width, height, fit, keeps_size: keepsSize } = settings;
  const channels = channelsOf(input.shape, settings);
  const { scale, mean, std } = SCALES[settings.values];
  const sides = keepsSize ? "" : `, size=(${height ?? "None"}, ${width ?? "None"})${fit === "stretch" ? "" : `, fit="${fit}"`}`;
  const form = `${layout === "NHWC" ? ', layout="NHWC"' : ""}${channels === 3 ? "" : `, channels=${channels}`}`;
  const factor = scale === 1 ? "" : ", scale=1 / 255";
  const normalized = mean ? `, mean=(${mean.slice(0, 3).join(", ")}), std=(${std.slice(0, 3).join(", ")})` : "";
  const shape = layout === "NHWC" ? [1, height, width, channels] : [1, channels, height, width];
  return { text: `picture("photo.jpg"${sides}${form}${factor}${normalized})`, shape: keepsSize || shape.includes(null) ? null : shape };
}

// A command with a file of the reader's, if the inputs are a picture or the columns of a table.
function command({ name, version, model, url }) {
  const { inputs } = model.metadata;
  const value = isPhoto(model) ? "photo.jpg" : inputs.length > 1 && inputs.every(isColumn) ? "rows.csv" : "--example";
  return `dragoman infer ${url} ${/^[\w.-]+$/.test(name) ? name : quote(name)} ${value}${version ? ` --version ${quote(version)}` : ""}`;
}

function tensorSnippets({ name, version, model, url, host, hasKey }) {
  const picture = photo(model);
  const { datatype, name: input } = model.metadata.inputs[0] ?? {};
  const pixels = picture?.shape ? [{ name: input, datatype, shape: picture.shape }] : [];
  const known = tensorsOf(model);
  const tensors = known.length > 0 ? known : pixels;
  if (tensors.length === 0 && !picture) return [];
  const arrays = tensors.map((tensor) => [tensor, array(tensor)]);
  const header = hasKey ? KEY : "";
  const [sent, file] = pixels.length > 0 ? [pixels, picture.text] : [tensors, ""];
  const found = sent.length > 0 ? [["curl", curl(word(`${url}${modelPath(name, version)}/infer`), header, sent, file)]] : [];
  found.push(["Terminal", command({ name, version, model, url })]);
  if (arrays.some(([, text]) => text === null)) return found;
  const token = hasKey ? ', token=os.environ["DRAGOMAN_API_KEY"]' : "";
  const imports = hasKey ? "import os\n\n" : "";
  const chosen = version ? `, version=${JSON.stringify(version)}` : "";
  const written = picture ? [[{ name: input }, picture.text]] : arrays;
  const modules = picture ? "import dragoman\nfrom dragoman.client import picture\n" : "import numpy as np\n\nimport dragoman\n";
  found.push([
    "Python",
    `${imports}${modules}\nwith dragoman.Client("${url}"${token}) as client:\n` +
      `    result = client.infer(${JSON.stringify(name)}, {\n${written.map(([t, text]) => `        ${JSON.stringify(t.name)}: ${text},\n`).join("")}    }${chosen})\n` +
      "    for output in result:\n        print(output, result[output])\n",
  ]);
  if (tensors.length === 0) return found;
  const headers = hasKey ? ', headers={"authorization": "Bearer " + os.environ["DRAGOMAN_API_KEY"]}' : "";
  const versioned = version ? `, model_version=${JSON.stringify(version)}` : "";
  const triton = (module, client) =>
    `${imports}import numpy as np\nimport tritonclient.${module} as triton\n\nclient = ${client}\ninputs = []\n` +
    arrays
      .map(
        ([t, text]) =>
          `inputs.append(triton.InferInput(${JSON.stringify(t.name)}, ${python(t.shape)}, "${t.datatype}"))\ninputs[-1].set_data_from_numpy(${text})\n`,
      )
      .join("") +
    `result = client.infer(${JSON.stringify(name)}, inputs${versioned}${headers})\n` +
    model.metadata.outputs.map((output) => `print(result.as_numpy(${JSON.stringify(output.name)}))\n`).join("");
  const secure = location.protocol === "https:";
  const address = `${host}${root}`;
  found.push(["tritonclient", triton("http", `triton.InferenceServerClient("${address}"${secure ? ", ssl=True" : ""})`)]);
  if (!root) found.push(["gRPC", triton("grpc", `triton.InferenceServerClient("${host}"${secure ? ", ssl=True" : ""})`)]);
  return found;
}

function textSnippets({ name, url, hasKey }) {
  const key = hasKey ? 'os.environ["DRAGOMAN_API_KEY"]' : '"-"';
  return [
    [
      "openai",
      `${hasKey ? "import os\n\n" : ""}import openai\n\nclient = openai.OpenAI(base_url="${url}/v1", api_key=${key})\n` +
        `answer = client.completions.create(model=${JSON.stringify(name)}, prompt="Once upon a time", max_tokens=32)\nprint(answer.choices[0].text)\n`,
    ],
    [
      "curl (text)",
      `curl ${url}/v1/completions${hasKey ? KEY : ""} -d ` +
        quote(JSON.stringify({ model: name, prompt: "Once upon a time", max_tokens: 32 })),
    ],
  ];
}

function simulatorSnippets({ name, url, hasKey, model }) {
  const input = tensorsOf(model).map(({ data }) => data?.flat(Infinity));
  const sizes = (model.metadata.outputs ?? []).map(({ shape }) => shape.at(-1));
  const post = (path, more) => `curl ${word(url + path)}${hasKey ? KEY : ""} -d ${quote(json({ name, input, ...more }))}`;
  const found = [];
  if (input.length > 0 && input.every(Boolean)) {
    const sens = model.support.Gradient && sizes[0] > 0 && sizes[0] <= MAX_WRITTEN && Array(sizes[0]).fill(1);
    found.push(["curl (UM-Bridge)", post("/Evaluate") + (sens ? `\n${post("/Gradient", { outWrt: 0, inWrt: 0, sens })}` : "")]);
  }
  if (!hasKey) found.push([
    "umbridge",
    `import umbridge\n\nmodel = umbridge.HTTPModel("${url}", ${JSON.stringify(name)})\n` +
      "point = [[1.0] * n for n in model.get_input_sizes()]\nprint(model(point))\n",
  ]);
  return found;
}

export function Snippets({ name, version, model }) {
  const [chosen, setChosen] = useState(0);
  const context = { name, version, model, url: location.origin + root, host: location.host, hasKey: storedKey() !== "" };
  const found = [
    ...(model.canGenerate ? textSnippets(context) : []),
    ...(model.support.Evaluate ? simulatorSnippets(context) : []),
    ...tensorSnippets(context),
  ];
  if (found.length === 0) {
    return html`<p class="note">The model does not declare its inputs, so there is no request to show. Its interface:
      <a href=${`${root}${modelPath(name, version)}/docs`}>API</a></p>`;
  }
  const [, text] = found[Math.min(chosen, found.length - 1)];
  return html`<div class="row">${found.map(
      ([title], i) => html`<button aria-pressed=${i === chosen} onClick=${() => setChosen(i)}>${title}</button>`,
    )}
    <${CopyButton} key=${chosen} text=${text} kind="" /></div>
    <pre class="code" tabindex="0">${text}</pre>
    <p class="note">Everything that the model offers: <a href=${`${root}${modelPath(name, version)}/docs`}>API</a></p>`;
}
