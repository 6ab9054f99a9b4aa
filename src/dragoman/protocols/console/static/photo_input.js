// Photos of a form: how each is sent, and the choices.
import { Choice } from "./choice.js";
import { html, useMemo } from "./html.js";
import { axesOf, channelsOf, Picture, SCALES } from "./images.js";
import { AS_IS, drawPhoto, FITS, fitsOf, preview } from "./photos.js";

const SIZES = [32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 416, 448, 512, 640, 768, 1024];

function Sent({ photo, field }) {
  const { settings } = field;
  const [picture, problem] = useMemo(() => {
    try {
      return [drawPhoto(photo, field, settings), ""];
    } catch (error) {
      return [null, error.message];
    }
  }, [photo, settings]);
  if (problem) return html`<p class="error" role="alert">${problem}</p>`;
  const size = `${picture.width} x ${picture.height}`;
  const original = `${photo.width} x ${photo.height}`;
  return html`<figure class="photo"><${Picture} picture=${preview(picture, field, settings)} label=${`Picture ${photo.name} as it is sent`} />
    <figcaption>${photo.name}: ${size}${size !== original && `, from ${original}`}</figcaption></figure>`;
}

// A side of the picture: what the shape declares, else a choice. An empty one keeps the proportions, beside another side.
function Side({ label, value, isFree, canBeEmpty, onChange }) {
  if (!isFree) return null;
  const change = ({ value: text, valueAsNumber: number }) => {
    if (number > 0) onChange(Math.round(number));
    else if (text === "" && canBeEmpty) onChange(null);
  };
  return html`<label>${label} <input type="number" min="1" max="8192" list="photo-sizes" value=${value ?? ""} placeholder="in proportion"
    onInput=${(e) => change(e.target)} /></label>`;
}

export function Photos({ field, onChange }) {
  const { settings, shape, pictures } = field;
  const axes = axesOf(settings, shape);
  const set = (values) => onChange({ settings: { ...settings, ...values } });
  const isAsIs = settings.fit === AS_IS;
  const names = Object.fromEntries(Object.entries(SCALES).map(([scale, { label }]) => [scale, label]));
  return html`<div class="row photos">${pictures.map((photo, i) => html`<${Sent} key=${i} photo=${photo} field=${field} />`)}</div>
    <div class="choices">
      <${Side} label="width" value=${settings.width} isFree=${shape[axes.width] < 0 && !isAsIs} canBeEmpty=${settings.height !== null} onChange=${(width) => set({ width })} />
      <${Side} label="height" value=${settings.height} isFree=${shape[axes.height] < 0 && !isAsIs} canBeEmpty=${settings.width !== null} onChange=${(height) => set({ height })} />
      <datalist id="photo-sizes">${SIZES.map((n) => html`<option value=${n}></option>`)}</datalist>
      <${Choice} label="fit" value=${settings.fit} options=${fitsOf(settings)} names=${FITS} onChange=${(fit) => set({ fit })} />
      <${Choice} label="values of a pixel" value=${settings.values} options=${Object.keys(SCALES)} names=${names} onChange=${(values) => set({ values })} />
      ${channelsOf(shape, settings) !== 1 && html`<${Choice} label="colours" value=${settings.order} options=${["RGB", "BGR"]} onChange=${(order) => set({ order })} />`}
      ${settings.layouts.length > 1 && html`<${Choice} label="axes" value=${settings.layout} options=${settings.layouts} onChange=${(layout) => set({ layout })} />`}
    </div>`;
}
