// The first example of a model, for inputs whose values would be too many to show, or that the model does not declare.
const MAX_WRITTEN = 4096; // elements

const count = ({ shape }) => shape.reduce((product, n) => product * n, 1);
const isWhole = ({ data, fill }) => data !== undefined || fill !== undefined;

// The tensors of the first of these examples by name, all of which can be sent.
export const samplesOf = (examples) => new Map((examples?.[0]?.inputs ?? []).filter(isWhole).map((tensor) => [tensor.name, tensor]));

// The inputs that a model declares, and those that only its example has.
export function specsOf(inputs, samples) {
  const declared = new Set(inputs.map(({ name }) => name));
  const others = [...samples.values()].filter(({ name }) => !declared.has(name));
  return [...inputs, ...others.map(({ name, datatype, shape }) => ({ name, datatype, shape: shape.map(() => -1) }))];
}

// A sample with all elements.
const sampleTensor = (sample) => ({
  name: sample.name, datatype: sample.datatype, shape: sample.shape, data: sample.data ?? Array(count(sample)).fill(sample.fill),
});

// A sample that a form can show, undefined for others.
export const shortSample = (sample) => (sample && count(sample) <= MAX_WRITTEN ? sampleTensor(sample) : undefined);

const json = (value) => (typeof value === "string" ? JSON.stringify(value) : String(value)); // of any integer

// A sample as a tensor of a request, whose data are JSON.
export const sampleRequest = (sample) => ({ ...sampleTensor(sample), data: `[${sampleTensor(sample).data.map(json).join(", ")}]` });

export const placeholderOf = (sample) => (sample ? `nothing: the example of ${sample.shape.join(" x ")}` : "");
