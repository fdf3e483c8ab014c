// Sliders to settings, panels to canvases. What the schedules are is Python's business: see worker.js.
const form = document.getElementById("settings");
const status = document.getElementById("status");
const hint = document.getElementById("hint");
const root = document.getElementById("panels");
const ROW = 22, LEFT = 18, RIGHT = 96; // pixels: a rank, its number, its figures
const HEAD = 16; // pixels: the names of these figures

// What stands at the right of every rank: the most that it holds, and the share of the step in which it waits. `end` is
// the distance of the column from the right.
const COLUMNS = [
  { name: "memory", end: 50, value: (panel, rank) => panel.memory[rank].toFixed(2) },
  { name: "bubble", end: 0, value: (panel, rank) => idle(panel, rank).toFixed(3) },
];

const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
worker.onerror = (event) => show({ error: `Python could not be started: ${event.message ?? "worker.js is missing"}.` });
worker.onmessage = ({ data }) => {
  const asked = pending.shift();
  if (pending.length) ask(); // the sliders have moved on
  show(JSON.parse(data), asked);
};

// The question that Python works on and, if there is one, the newest behind it.
let pending = [];

function ask() {
  worker.postMessage(pending[pending.length - 1]);
  pending = pending.slice(-1);
}

// The controls of the page itself, which Python does not know.
const OF_THE_PAGE = ["preset", "zoom"];

function settings() {
  const isNumber = (input) => input.type === "range";
  return Object.fromEntries([...form.elements].filter((input) => input.name && !OF_THE_PAGE.includes(input.name))
    .map((input) => [input.name, isNumber(input) ? Number(input.value) : input.value]));
}

// Controls that change nothing with the present values of the others.
const WITHOUT_EFFECT = {
  placement: ({ chunks }) => chunks === 1,
  cut: ({ segments }) => segments === 1,
  memory: ({ family }) => family !== "auto",
};

function update() {
  for (const [name, isIdle] of Object.entries(WITHOUT_EFFECT)) form.elements[name].disabled = isIdle(settings());
  for (const input of form.querySelectorAll("input")) input.nextElementSibling.value = input.value;
  history.replaceState(null, "", "#" + new URLSearchParams(settings()));
  const isIdle = pending.length === 0;
  pending = [...pending.slice(0, 1), JSON.stringify(settings())];
  if (isIdle) ask();
}

let shown = null; // the newest answer

function show(answer) {
  status.className = answer.error ? "error" : "";
  status.textContent = answer.error ?? compared(answer.panels);
  shown = answer.error ? null : answer;
  if (answer.error) {
    root.replaceChildren();
    return;
  }
  const longest = Math.max(...answer.panels.map((panel) => panel.time));
  root.replaceChildren(...answer.panels.map((panel) => figure(panel, answer.looks)));
  answer.panels.forEach((panel, i) => draw(root.children[i].querySelector("canvas"), panel, longest, answer.looks));
}

const most = (panel) => Math.max(...panel.memory);

function compared([ours, plain]) {
  if (!plain) return "";
  return `${(ours.time / plain.time).toFixed(3)} of the time and ${(most(ours) / most(plain)).toFixed(3)} of the ` +
    "activation memory of 1F1B with whole sequences.";
}

function described(panel) {
  const chunks = panel.chunks > 1 ? `, ${panel.chunks} chunks` : "";
  const segments = panel.segments > 1 ? `${panel.segments} segments` : "whole sequences";
  return `${panel.name}, ${segments}${chunks}: step ${panel.time.toFixed(2)}, bubble ratio ` +
    `${panel.bubble_ratio.toFixed(3)}, at most ${most(panel).toFixed(2)} sequences in memory`;
}

// The share of a step in which a rank waits.
function idle(panel, rank) {
  const busy = panel.ranks[rank].reduce((sum, [, , , , start, end]) => sum + end - start, 0);
  return 1 - busy / panel.time;
}

// The kinds of actions that a panel has, in the order of legends.
function kindsOf(panel, looks) {
  const used = new Set(panel.ranks.flat().map(([kind]) => kind));
  return Object.keys(looks).filter((kind) => used.has(kind));
}

function figure(panel, looks) {
  const element = document.createElement("figure");
  const caption = document.createElement("figcaption");
  caption.textContent = described(panel);
  const legend = document.createElement("span");
  for (const kind of kindsOf(panel, looks)) {
    const mark = document.createElement("span");
    mark.textContent = " \u25a0 ";
    mark.style.color = panel.colours[kind].at(-1);
    legend.append(mark, looks[kind].name);
  }
  const canvas = document.createElement("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `Timeline: a row for each of ${panel.ranks.length} ranks. ${caption.textContent}.`);
  element.append(caption, legend, canvas);
  return element;
}

function draw(canvas, panel, longest, looks) {
  const ratio = window.devicePixelRatio, height = HEAD + ROW * panel.ranks.length;
  const width = root.clientWidth * Number(form.elements.zoom.value);
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "11px sans-serif";
  pen.textBaseline = "middle";
  pen.strokeStyle = "#404040";
  pen.lineWidth = 0.4;
  const scale = (width - LEFT - RIGHT) / longest;
  const colour = getComputedStyle(root).color;
  pen.fillStyle = colour;
  pen.fillText("rank", 0, HEAD / 2);
  pen.textAlign = "right";
  for (const { name, end } of COLUMNS) pen.fillText(name, width - end, HEAD / 2);
  panel.ranks.forEach((boxes, rank) => {
    const top = HEAD + ROW * rank, middle = top + ROW / 2;
    pen.fillStyle = colour;
    pen.textAlign = "left";
    pen.fillText(rank, 0, middle);
    pen.textAlign = "right";
    for (const { end, value } of COLUMNS) pen.fillText(value(panel, rank), width - end, middle);
    for (const [kind, chunk, microbatch, segment, start, end] of boxes) {
      const left = LEFT + start * scale, wide = (end - start) * scale;
      pen.fillStyle = panel.colours[kind][segment];
      pen.fillRect(left, top + 1, wide, ROW - 2);
      if (wide > 2) pen.strokeRect(left, top + 1, wide, ROW - 2);
      if (chunk) {
        pen.fillStyle = "#404040";
        const bar = 4 * chunk / (panel.chunks - 1);
        pen.fillRect(left, top + ROW - 1 - bar, wide, bar);
      }
      if (wide > 7 * String(microbatch).length + 2) {
        pen.fillStyle = looks[kind].number;
        pen.textAlign = "center";
        pen.fillText(microbatch, left + wide / 2, middle);
      }
    }
  });
  canvas.onpointerleave = () => (hint.hidden = true);
  canvas.onpointerdown = canvas.onpointermove = (event) => {
    const time = (event.offsetX - LEFT) / scale;
    const boxes = panel.ranks[Math.floor((event.offsetY - HEAD) / ROW)];
    const box = boxes?.find(([, , , , start, end]) => start <= time && time < end);
    hint.hidden = !box;
    if (!box) return;
    const chunk = panel.chunks > 1 ? `, chunk ${box[1]}` : "";
    hint.textContent = `${looks[box[0]].name} of micro-batch ${box[2]}, segment ${box[3]}${chunk}: ` +
      `${box[4].toFixed(2)} to ${box[5].toFixed(2)}`;
    hint.style.left = Math.max(0, Math.min(event.clientX + 12, window.innerWidth - hint.offsetWidth - 4)) + "px";
    hint.style.top = event.clientY + 12 + "px";
  };
}

// The schedule as flags of training, and as a command that draws it.
function flags() {
  const { family, segments, ranks, chunks, placement, cut } = settings();
  const words = [`--pipeline-schedule ${family}`, `--pipeline-model-parallel-size ${ranks}`];
  if (segments > 1) words.push(`--sequence-splits ${segments}`, `--sequence-split-strategy ${cut}`);
  if (chunks > 1) words.push(`--num-virtual-stages-per-pipeline-rank ${chunks}`);
  if (chunks > 1 && placement !== "looped") words.push(`--pipeline-placement ${placement}`);
  return words;
}

const COPIES = {
  flags: () => flags().join(" "),
  // The command takes costs instead of a cut: from a file, since they differ from segment to segment.
  plot: () => {
    const limit = shown.limit === null ? [] : [`--memory-limit ${shown.limit}`];
    const words = ["seq1f1b plot", ...flags().filter((word) => !word.startsWith("--sequence-split-strategy")),
      `--num-microbatches ${settings().microbatches}`, "--costs costs.json", ...limit, "--output schedule.svg"];
    return `echo '${JSON.stringify(shown.costs)}' > costs.json\n${words.join(" ")}`;
  },
};

// The panels, one below the other, in times of a forward as units of the picture.
function svg({ panels, looks }) {
  const SCALE = 60, MARGIN = 8;
  const longest = Math.max(...panels.map((panel) => panel.time));
  const width = Math.max(LEFT + SCALE * longest + RIGHT, 600); // a short step has room for its words
  const parts = [];
  const rect = (left, top, wide, high, more) => parts.push(
    `<rect x="${left.toFixed(2)}" y="${top}" width="${wide.toFixed(2)}" height="${high}" ${more}`);
  const text = (left, top, words, more = "") => parts.push(
    `<text x="${left.toFixed(2)}" y="${top + 14}" ${more}>${words}</text>`);
  let top = 0;
  for (const panel of panels) {
    text(0, top, described(panel));
    top += ROW;
    let beside = LEFT;
    for (const kind of kindsOf(panel, looks)) {
      rect(beside, top + 5, 10, 10, `fill="${panel.colours[kind].at(-1)}"/>`);
      text(beside + 14, top, looks[kind].name);
      beside += 30 + 6 * looks[kind].name.length;
    }
    for (const { name, end } of COLUMNS) text(width - end, top, name, 'text-anchor="end"');
    top += ROW;
    panel.ranks.forEach((boxes, rank) => {
      const y = top + ROW * rank;
      text(0, y, rank);
      for (const { end, value } of COLUMNS) text(width - end, y, value(panel, rank), 'text-anchor="end"');
      for (const [kind, chunk, microbatch, segment, start, end] of boxes) {
        const left = LEFT + SCALE * start, wide = SCALE * (end - start);
        rect(left, y, wide, ROW - 2, `fill="${panel.colours[kind][segment]}" stroke="#404040" stroke-width="0.4">` +
          `<title>${looks[kind].name} of micro-batch ${microbatch}, segment ${segment}</title></rect>`);
        if (chunk) { // a bar, the higher the later the chunk
          const bar = 4 * chunk / (panel.chunks - 1);
          rect(left, y + ROW - 2 - bar, wide, bar, 'fill="#404040"/>');
        }
        if (wide > 7 * String(microbatch).length + 2) {
          text(left + wide / 2, y, microbatch, `text-anchor="middle" fill="${looks[kind].number}"`);
        }
      }
    });
    top += ROW * panel.ranks.length + ROW / 2;
  }
  const wide = (width + 2 * MARGIN).toFixed(2), high = top + 2 * MARGIN;
  const sizes = `width="${wide}" height="${high}" viewBox="${-MARGIN} ${-MARGIN} ${wide} ${high}"`;
  return `<svg xmlns="http://www.w3.org/2000/svg" ${sizes} style="max-width: 100%; height: auto" ` +
    `font-family="sans-serif" font-size="11">` +
    `<rect x="${-MARGIN}" y="${-MARGIN}" width="100%" height="100%" fill="white"/>${parts.join("")}</svg>`;
}

async function copy(event) {
  if (!shown) return;
  const button = event.target;
  await navigator.clipboard.writeText(COPIES[button.dataset.copy]());
  const text = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = text), 1000);
}

function save() {
  if (!shown) return;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([svg(shown)], { type: "image/svg+xml" }));
  link.download = "schedule.svg";
  link.click();
  URL.revokeObjectURL(link.href);
}

// A preset keeps ranks, micro-batches and costs.
const OF_PRESETS = "family=1f1b&segments=1&chunks=1&placement=looped&cut=balanced&memory=1";

function startFrom(preset) {
  if (preset) preset = `${OF_PRESETS}&${preset}`;
  for (const [name, value] of new URLSearchParams(preset)) form.elements[name].value = value;
  update();
}

// The address sets the controls; a value that a list does not have leaves it as it is.
function follow() {
  form.elements.preset.value = "";
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const input = form.elements[name];
    if (input && (!input.options || [...input.options].some((option) => option.value === value))) input.value = value;
  }
  update();
}

form.addEventListener("input", ({ target }) => {
  if (target.name === "preset") startFrom(target.value);
  else {
    if (!OF_THE_PAGE.includes(target.name)) form.elements.preset.value = "";
    update();
  }
});
for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", copy);
document.getElementById("svg").addEventListener("click", save);
window.addEventListener("resize", update);
window.addEventListener("hashchange", follow);
follow();
