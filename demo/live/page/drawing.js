// Pictures on canvases, and small pieces of the page.

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Make an element with attributes and children. */
export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Make a square picture with a caption: a name, and what it means. */
export function picture(name, meaning, side, kind = "") {
  const canvas = make("canvas", { width: side, height: side, role: "img" });
  canvas.setAttribute("aria-label", `${name}: ${meaning}`);
  const caption = make("figcaption", {}, make("b", kind ? { class: kind } : {}, name), " ",
    make("span", {}, meaning));
  return { figure: make("figure", {}, canvas, caption), canvas };
}

/** Draw numbers as grey levels, from low (black) to high (white), or from paper to a colour. */
export function paint(canvas, numbers, { low = 0, high = 1, shade = grey } = {}) {
  const side = canvas.width;
  const context = canvas.getContext("2d");
  const image = context.createImageData(side, side);
  numbers.forEach((number, place) => {
    const level = Math.min(1, Math.max(0, (number - low) / (high - low)));
    image.data.set([...shade(level), 255], 4 * place);
  });
  context.putImageData(image, 0, 0);
}

export function grey(level) {
  const value = Math.round(255 * level);
  return [value, value, value];
}

/** Dark blue to yellow: for amounts, not for brightness. */
export function heat(level) {
  const stops = [[22, 24, 60], [70, 50, 130], [190, 70, 100], [245, 150, 60], [250, 240, 150]];
  const at = level * (stops.length - 1);
  const first = Math.min(stops.length - 2, Math.floor(at));
  return stops[first].map((value, i) =>
    Math.round(value + (at - first) * (stops[first + 1][i] - value)));
}

/** Numbers such as 0.083 and 2.1e-16, and 0. */
export function format(number) {
  if (number === 0) return "0";
  return Math.abs(number) < 1e-3 ? number.toExponential(1) : number.toFixed(3);
}

/** Shuffle in place, the same way for the same seed. */
export function shuffled(items, seed) {
  let state = seed + 1;
  for (let last = items.length - 1; last > 0; last--) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    const other = Math.floor((state / 2 ** 32) * (last + 1));
    [items[last], items[other]] = [items[other], items[last]];
  }
  return items;
}
