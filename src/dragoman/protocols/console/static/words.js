// Names, numbers and times for people.

const PLATFORMS = {
  onnx_onnxv1: "ONNX model", tensorflow_savedmodel: "TensorFlow model", tensorflow_graphdef: "TensorFlow graph",
  pytorch_torchscript: "TorchScript model", pytorch_export: "PyTorch model", huggingface_pytorch: "Hugging Face model",
  huggingface_generation: "language model", openvino_generation: "language model (OpenVINO)", vllm_generation: "language model (vLLM)",
  openvino_ir: "OpenVINO model", tensorrt_plan: "TensorRT engine", catboost_cbm: "CatBoost model", lightgbm_text: "LightGBM model",
  xgboost_json: "XGBoost model", xgboost_ubj: "XGBoost model", xgboost_pickle: "XGBoost model (pickle)",
  sklearn_joblib: "scikit-learn model (joblib)", sklearn_pickle: "scikit-learn model (pickle)", mlflow_pyfunc: "MLflow model",
  umbridge_model: "UM-Bridge model", dragoman_graph: "graph of functions", ensemble: "ensemble of models", kserve_model: "KServe model",
  python: "Python model", python_function: "Python function",
};

export const platformName = (platform) => PLATFORMS[platform] ?? (platform ?? "").replaceAll("_", " ");
export const plural = (n, noun) => `${n} ${noun}${Number(n) === 1 ? "" : "s"}`;

// A time in milliseconds with its unit, three digits at most.
export function duration(ms) {
  if (ms >= 60_000) return `${(ms / 60_000).toFixed(1)} min`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  return `${ms.toFixed(ms < 10 ? 2 : ms < 100 ? 1 : 0)} ms`;
}

const KINDS = { outliers: "outlier detection", rerank: "reranker", image: "images", model: "model" };
const GROUPS = {
  text: ["chat", "completion", "text", "embeddings", "rerank"], numbers: ["classifier", "regressor", "clustering", "outliers", "preprocessor"],
  senses: ["detector", "segmentation", "image", "audio", "speech"], science: ["simulator", "graph", "ensemble"],
};
export const kindName = (kind) => KINDS[kind] ?? kind;
export const kindGroup = (kind) => Object.keys(GROUPS).find((group) => GROUPS[group].includes(kind)) ?? "other";

// Calls per second, in as few digits as it takes.
export const rate = (value) => `${value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : Number(value.toFixed(2))} calls/s`;
