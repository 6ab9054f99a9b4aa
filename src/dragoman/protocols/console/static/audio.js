// Sounds: from files and the microphone to tensors, and from outputs to a player.
import { html, useEffect, useMemo, useRef, useState } from "./html.js";

const RATE = 16_000; // of most models of speech
const [MIN_RATE, MAX_RATE] = [3_000, 192_000];
const MIN_SAMPLES = 800; // of a fixed length, or of an output
const NAME = /audio|wav|speech|pcm|sound|voice|signal|samples?$/i;
const RATE_NAME = /^(sr|fs|sample_?rate|sampling_?rate|rate)$/i;
const STATE_NAME = /state|hidden|cache|^[hc][0n]?$/i;
const PART = 512; // samples
const ARRAYS = { FP16: globalThis.Float16Array, FP32: Float32Array, FP64: Float64Array, INT16: Int16Array };
const COLUMNS = 300;

// The axis of the samples, if all others are free or of length 1; -1 for other shapes. Two free axes are items and samples.
export function sampleAxis(shape) {
  const long = shape.findIndex((n) => n >= MIN_SAMPLES);
  const axis = long >= 0 ? long : shape.findLastIndex((n) => n < 0);
  return axis >= 0 && shape.length <= 3 && shape.every((n, i) => i === axis || n === 1 || n === -1) ? axis : -1;
}

// Whether a tensor is the rate of a sound: one number. A `rate` for each row of a table may be any rate.
export const isRate = ({ name, shape, datatype }) =>
  RATE_NAME.test(name) && /INT|FP/.test(datatype) && shape.every((n) => n === 1 || (n === -1 && !/^rate$/i.test(name)));

// Whether a name or the kind of a model says that it takes sounds. That one of its inputs is called `rate` does not.
export const isCalledSound = ({ name }, { kind }) => kind === "audio" || NAME.test(name);

// Whether an input takes sounds: "yes", "perhaps" (files only) or "".
export function takesSound(field, model) {
  if (!ARRAYS[field.datatype] || field.anyRank || sampleAxis(field.shape) < 0) return "";
  const isSure = isCalledSound(field, model) || model.metadata.inputs.some(isRate);
  return isSure ? "yes" : "perhaps";
}

// The rate that the model's own input for it has, else that of most models.
export const firstRate = (text) => (Number(text) >= MIN_RATE ? Number(text) : RATE);

// Decode a file at a rate, as one channel. Throws an Error.
export async function decode(encoded, rate, name) {
  if (!(rate >= MIN_RATE && rate <= MAX_RATE)) throw new Error(`expected a rate of ${MIN_RATE} to ${MAX_RATE} Hz`);
  let buffer;
  try {
    buffer = await new OfflineAudioContext(1, 1, rate).decodeAudioData(encoded.slice(0));
  } catch {
    throw new Error(`'${name}' is not a sound that this browser can read`);
  }
  const samples = new Float32Array(buffer.length);
  for (let c = 0; c < buffer.numberOfChannels; c++) {
    const channel = buffer.getChannelData(c);
    for (let i = 0; i < samples.length; i++) samples[i] += channel[i] / buffer.numberOfChannels;
  }
  return samples;
}

// How many samples are sent at first, 0 for all: a model with a state takes a sound in short parts.
export const firstMost = (inputs) => (inputs.some(({ name }) => STATE_NAME.test(name)) ? PART : 0);

export async function readSound(file, rate, most = 0) {
  const encoded = await file.arrayBuffer();
  return { name: file.name, encoded, rate, from: 0, most, samples: await decode(encoded, rate, file.name) };
}

// The samples that are sent: from a second on, at most `most` if that is not 0, cut to the length that the shape declares or
// filled with silence.
export function sentSamples({ samples, from, rate, most }, { shape }) {
  const length = shape[sampleAxis(shape)];
  const first = Math.min(samples.length, Math.round(from * rate));
  const cut = samples.subarray(first, most > 0 ? first + most : samples.length);
  if (length < 0) return cut;
  const found = new Float32Array(length);
  found.set(cut.subarray(0, length));
  return found;
}

export function soundTensor(sound, field) {
  const { shape, datatype } = field;
  const samples = sentSamples(sound, field);
  if (samples.length === 0) throw new Error("the sound is empty from there on");
  const values = new ARRAYS[datatype](samples.length);
  samples.forEach((v, i) => (values[i] = datatype === "INT16" ? Math.round(32767 * Math.max(-1, Math.min(1, v))) : v));
  const axis = sampleAxis(shape);
  return { bytes: new Uint8Array(values.buffer), shape: shape.map((n, i) => (i === axis ? samples.length : 1)) };
}

// A WAV file of 16 bits.
export function wav(samples, rate) {
  const bytes = new ArrayBuffer(44 + 2 * samples.length);
  const view = new DataView(bytes);
  const text = (at, value) => [...value].forEach((c, i) => view.setUint8(at + i, c.charCodeAt(0)));
  text(0, "RIFF"), view.setUint32(4, 36 + 2 * samples.length, true), text(8, "WAVEfmt "), view.setUint32(16, 16, true);
  view.setUint16(20, 1, true), view.setUint16(22, 1, true), view.setUint32(24, rate, true), view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true), view.setUint16(34, 16, true), text(36, "data"), view.setUint32(40, 2 * samples.length, true);
  for (let i = 0; i < samples.length; i++) view.setInt16(44 + 2 * i, Math.round(32767 * Math.max(-1, Math.min(1, samples[i]))), true);
  return new Blob([bytes], { type: "audio/wav" });
}

// A player of a Blob.
export function Player({ blob, label }) {
  const holder = useRef(null);
  useEffect(() => {
    const url = URL.createObjectURL(blob);
    holder.current.src = url;
    return () => URL.revokeObjectURL(url);
  }, [blob]);
  return html`<audio ref=${holder} controls aria-label=${label}></audio>`;
}

// The wave form of samples, and a player.
function Wave({ samples, rate, label }) {
  const path = useMemo(() => {
    const size = Math.max(1, Math.ceil(samples.length / COLUMNS));
    let text = "";
    for (let from = 0; from < samples.length; from += size) {
      let [low, high] = [0, 0];
      for (let i = from; i < Math.min(samples.length, from + size); i++) [low, high] = [Math.min(low, samples[i]), Math.max(high, samples[i])];
      const y = (v) => (50 - 50 * Math.max(-1, Math.min(1, v))).toFixed(1);
      text += `M${from / size + 0.5} ${y(low)}V${y(high === low ? high + 0.01 : high)}`;
    }
    return text;
  }, [samples]);
  const blob = useMemo(() => wav(samples, rate), [samples, rate]);
  return html`<svg class="wave" viewBox=${`0 0 ${COLUMNS} 100`} preserveAspectRatio="none" role="img" aria-label=${`Wave form of ${label}`}><path d=${path} /></svg>
    <${Player} blob=${blob} label=${`Play ${label}`} />`;
}

// A sound of the form: what is sent, at which rate and from where.
export function Sound({ field, onChange }) {
  const { sound } = field;
  const samples = useMemo(() => sentSamples(sound, field), [sound]);
  const latest = useRef(sound);
  latest.current = sound;
  const turn = useRef(0);
  async function setRate(rate) {
    const mine = ++turn.current;
    try {
      const decoded = await decode(sound.encoded, rate, sound.name);
      if (mine === turn.current) onChange({ sound: { ...latest.current, rate, samples: decoded }, problem: "" });
    } catch (error) {
      onChange({ problem: error.message });
    }
  }
  return html`<${Wave} samples=${samples} rate=${sound.rate} label=${sound.name} />
    <p class="note">${sound.name}: ${samples.length} samples, ${(samples.length / sound.rate).toFixed(2)} s of ${(sound.samples.length / sound.rate).toFixed(2)} s</p>
    <div class="choices"><label>samples a second (Hz) <input type="number" min=${MIN_RATE} max=${MAX_RATE} value=${sound.rate}
        onInput=${(e) => e.target.valueAsNumber >= MIN_RATE && setRate(Math.round(e.target.valueAsNumber))} /></label>
      <label>from second <input type="number" min="0" step="any" value=${sound.from} onInput=${(e) => e.target.valueAsNumber >= 0 && onChange({ sound: { ...sound, from: e.target.valueAsNumber } })} /></label>
      ${field.shape[sampleAxis(field.shape)] < 0 && html`<label>samples at most <input type="number" min="1" placeholder="all" value=${sound.most || ""}
        onInput=${(e) => onChange({ sound: { ...sound, most: Math.max(0, Math.round(e.target.valueAsNumber || 0)) } })} /></label>`}</div>`;
}

// A button that records from the microphone. `onFile` gets the file.
export function Recorder({ onFile, onProblem }) {
  const [recorder, setRecorder] = useState(null);
  const current = useRef(null);
  useEffect(() => () => current.current?.stop(), []);
  async function start() {
    if (!navigator.mediaDevices) return onProblem("recording needs an https address, or localhost");
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      const found = new MediaRecorder(stream);
      const parts = [];
      found.ondataavailable = ({ data }) => parts.push(data);
      found.onstop = () => {
        stream.getTracks().forEach((track) => track.stop());
        onFile(new File(parts, "recording", { type: found.mimeType }));
      };
      found.start();
      current.current = { stop: () => found.state === "recording" && found.stop() };
      setRecorder(found);
    } catch (error) {
      onProblem(error.name === "NotAllowedError" ? "the browser does not allow the microphone" : `no microphone: ${error.message}`);
    }
    return undefined;
  }
  const stop = () => (current.current.stop(), setRecorder(null));
  return html`<button type="button" class=${recorder ? "recording" : ""} onClick=${recorder ? stop : start}>${recorder ? "Stop recording" : "Record"}</button>`;
}

// The samples of an output, { samples, isCertain }; null if it has none.
export function soundOf({ name, datatype, shape, data }, kind = "") {
  const length = Math.max(...shape, 0);
  if (!ARRAYS[datatype] || length < MIN_SAMPLES || shape.some((n) => n !== 1 && n !== length) || shape.filter((n) => n > 1).length !== 1) return null;
  const scale = datatype === "INT16" ? 1 / 32768 : 1;
  return { samples: Float32Array.from(data.flat(Infinity), (v) => (v ?? 0) * scale), isCertain: NAME.test(name) || (kind === "audio" && length >= 10 * MIN_SAMPLES) };
}

export function SoundView({ title, samples, rate: first }) {
  const [rate, setRate] = useState(first);
  return html`<${Wave} samples=${samples} rate=${rate} label=${title} />
    <div class="choices"><label>samples a second (Hz) <input type="number" min=${MIN_RATE} max=${MAX_RATE} value=${rate}
      onInput=${(e) => e.target.valueAsNumber >= MIN_RATE && e.target.valueAsNumber <= MAX_RATE && setRate(Math.round(e.target.valueAsNumber))} /></label>
      <span class="note">${(samples.length / rate).toFixed(2)} s</span></div>`;
}

const ENCODED = [[/^UklGR/, "wav"], [/^T2dnU/, "ogg"], [/^ZkxhQ/, "flac"], [/^(SUQz|\/\/[tuv])/, "mpeg"]];

// A sound file in base64 as a Blob, null for any other text.
export function encodedSound(text) {
  const type = typeof text === "string" && /^[A-Za-z0-9+/]+={0,2}$/.test(text) && ENCODED.find(([start]) => start.test(text))?.[1];
  return type ? new Blob([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], { type: `audio/${type}` }) : null;
}
