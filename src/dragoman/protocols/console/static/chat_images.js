// Pictures for models that take them, as data URLs.
const SENT_AS_IS = ["image/png", "image/jpeg", "image/webp"];
const MAX_BYTES = 3 << 20; // a larger file becomes a JPEG of at most MAX_SIDE pixels a side
const MAX_SIDE = 2048;

// Return the data URL of a file. Throws an Error if it is not a picture.
export async function dataUrl(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`'${file.name}' is not a picture that this browser can read`);
  }
  if (SENT_AS_IS.includes(file.type) && file.size <= MAX_BYTES) return readFile(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.92);
}

function readFile(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
