// The playground: uploads an image once, draws its tiles, streams answers, tells what each one cost.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const BASE = new URL("..", import.meta.url); // where the server lies, under whatever path a proxy shows it

const state = { key: sessionStorage.getItem("key") ?? "", model: null, file: null, image: null, cost: null, busy: null, times: { cold: null, warm: [] } };

async function call(path, options = {}) {
  const headers = { ...(options.headers ?? {}) };
  if (state.key) headers.authorization = `Bearer ${state.key}`;
  const response = await fetch(new URL(path, BASE), { ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `The server answered ${response.status}.`);
  error.status = response.status;
  error.code = body?.error?.code;
  throw error;
}

const postJson = (path, value, more = {}) =>
  call(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(value), ...more });

function fail(error) {
  if (error.status === 401) $("key-form").hidden = false;
  $("error").textContent = error.message;
  $("error").hidden = false;
}

function clearError() {
  $("error").hidden = true;
}

const ms = (value) => (value < 10 ? `${value.toFixed(1)} ms` : value < 2000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`);
const bytes = (value) => (value < 2 ** 20 ? `${Math.round(value / 1024)} KB` : `${(value / 2 ** 20).toFixed(1)} MB`);
const median = (values) => [...values].sort((a, b) => a - b)[Math.floor((values.length - 1) / 2)];

async function connect() {
  try {
    const models = await (await call("v1/models")).json();
    state.model = models.data[0].id;
    $("model").textContent = state.model;
    $("key-form").hidden = true;
    clearError();
  } catch (error) {
    $("model").textContent = "not connected";
    fail(error);
  }
  await look();
}

async function look() {
  const ready = await fetch(new URL("health/ready", BASE)).then((r) => r.ok, () => false);
  $("light").className = `light ${ready ? "ready" : "down"}`;
  $("light").title = ready ? "The server is ready" : "The server is not ready";
}

// The image

async function choose(file) {
  if (!file) return;
  clearError();
  state.busy?.abort();
  try {
    const stored = await upload(file);
    state.file = file;
    state.image = stored;
    state.times = { cold: null, warm: [] };
    $("log").replaceChildren();
    $("compare").hidden = true;
    $("empty").hidden = false;
    URL.revokeObjectURL($("image").src);
    $("image").src = URL.createObjectURL(file);
    $("image").alt = `The chosen image, ${file.name}`;
    $("figure").hidden = $("facts").hidden = $("options").hidden = false;
    $("drop").classList.add("filled");
    $("pick").replaceChildren(strong("Choose another"), " or drop or paste one");
    $("send").disabled = false;
    await estimate();
    $("question").focus();
  } catch (error) {
    fail(error);
  }
}

async function upload(file) {
  const response = await call("v1/images", { method: "POST", body: file, headers: { "content-type": "application/octet-stream" } });
  return response.json();
}

const messages = (question) => [
  {
    role: "user",
    content: [
      { type: "image_url", image_url: { url: state.image.id, detail: $("detail").value } },
      { type: "text", text: question },
    ],
  },
];

async function estimate() {
  const cost = await (await postJson("v1/estimate", { messages: messages("?") })).json();
  const image = cost.images[0];
  const perTile = image.image_tokens / image.tiles;
  const { rows, cols, thumbnail } = image.grid;
  const whole = rows === 0;
  state.cost = image;
  drawTiles();
  $("tiles-title").textContent = whole
    ? `The whole image is one tile of ${perTile} visual tokens.`
    : `${rows} × ${cols} tiles of ${perTile} visual tokens each${thumbnail ? `, and ${perTile} for the image as a whole` : ""}.`;
  $("fact-size").textContent = `${image.width} × ${image.height}`;
  $("fact-tiles").textContent = whole ? "1" : `${rows} × ${cols}${thumbnail ? " + 1" : ""}`;
  $("fact-tokens").textContent = image.image_tokens;
  $("fact-kv").textContent = bytes(cost.kv_bytes);
}

function shape(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// The overlay lies exactly over the drawn pixels, which object-fit centres in the img box.
function drawTiles() {
  const image = $("image");
  if (!image.naturalWidth || !state.cost) return;
  const scale = Math.min(image.clientWidth / image.naturalWidth, image.clientHeight / image.naturalHeight);
  const [width, height] = [image.naturalWidth * scale, image.naturalHeight * scale];
  const svg = $("tiles");
  svg.style.width = `${width}px`;
  svg.style.height = `${height}px`;
  svg.style.left = `${image.offsetLeft + (image.clientWidth - width) / 2}px`;
  svg.style.top = `${image.offsetTop + (image.clientHeight - height) / 2}px`;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const { grid, image_tokens, tiles } = state.cost;
  const [rows, cols] = [grid.rows || 1, grid.cols || 1];
  const [w, h] = [width / cols, height / rows];
  const size = Math.min(13, w * 0.35, h * 0.35);
  const parts = [];
  for (let row = 0; row < rows; row++) {
    for (let col = 0; col < cols; col++) {
      const box = { x: col * w, y: row * h, width: w, height: h };
      parts.push(shape("rect", { ...box, class: "tile-shadow" }), shape("rect", { ...box, class: "tile" }));
      const at = { x: col * w + size * 0.7, y: row * h + size * 1.1 };
      parts.push(shape("text", { ...at, "font-size": size, class: "tile-label" }, image_tokens / tiles));
    }
  }
  svg.replaceChildren(...parts);
}

function strong(text) {
  const element = document.createElement("strong");
  element.textContent = text;
  return element;
}

// Questions

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}

async function ask(question) {
  clearError();
  $("empty").hidden = true;
  const item = document.createElement("li");
  const answer = element("p", "a busy");
  const meter = element("p", "m");
  item.append(element("p", "q", question), answer, meter);
  $("log").append(item);
  item.scrollIntoView({ block: "nearest" });
  state.busy = new AbortController();
  $("send").disabled = true;
  $("stop").hidden = false;
  try {
    await stream(question, answer, meter);
  } catch (error) {
    if (error.name === "AbortError") meter.append(element("span", "", "stopped"));
    else fail(error);
    if (!answer.textContent && error.name !== "AbortError") item.remove();
  } finally {
    answer.classList.remove("busy");
    $("send").disabled = false;
    $("stop").hidden = true;
    state.busy = null;
  }
}

async function open(question) {
  const body = { model: state.model, messages: messages(question), stream: true, stream_options: { include_usage: true } };
  try {
    return await postJson("v1/chat/completions", body, { signal: state.busy.signal });
  } catch (error) {
    if (error.code !== "image_not_found") throw error;
    state.image = await upload(state.file); // the server forgot it: send it again
    return postJson("v1/chat/completions", { ...body, messages: messages(question) }, { signal: state.busy.signal });
  }
}

async function stream(question, answer, meter) {
  const started = performance.now();
  let first = null;
  let timings = null;
  for await (const event of events(await open(question))) {
    if (event.error) throw new Error(event.error.message);
    const text = event.choices[0]?.delta?.content ?? "";
    if (text && first === null) first = performance.now() - started;
    answer.append(answer.textContent ? text : text.trimStart());
    timings = event.timings ?? timings;
    if (event.usage) tell(event.usage, timings, first ?? performance.now() - started, meter);
  }
}

function tell(usage, timings, ttft, meter) {
  const { cached_tokens: cached, image_tokens: imageTokens } = usage.prompt_tokens_details;
  const warm = cached > 0 && timings?.encode_ms === 0;
  if (warm) state.times.warm.push(ttft);
  else state.times.cold ??= ttft;
  meter.append(
    element("span", warm ? "warm" : "cold", `${warm ? "warm" : "cold"}: first token after ${ms(ttft)}`),
    element("span", "", `${usage.prompt_tokens} prompt tokens (${imageTokens} visual), ${cached} from the cache`),
    element("span", "", `${usage.completion_tokens} tokens in ${ms(timings?.total_ms ?? 0)}`),
  );
  $("compare").hidden = false;
  $("cold").textContent = state.times.cold === null ? "–" : ms(state.times.cold);
  $("warm").textContent = state.times.warm.length ? ms(median(state.times.warm)) : "–";
  $("cached").textContent = `${cached} of ${usage.prompt_tokens}`;
}

// Events

$("file").addEventListener("change", () => choose($("file").files[0]));
$("detail").addEventListener("change", () => estimate().catch(fail));
$("show-tiles").addEventListener("change", (event) => $("tiles").toggleAttribute("hidden", !event.target.checked));
$("image").addEventListener("load", drawTiles);
new ResizeObserver(drawTiles).observe($("stage"));
$("stop").addEventListener("click", () => state.busy?.abort());
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || !state.image || state.busy) return;
  $("question").value = "";
  ask(question);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = $("key").value.trim();
  sessionStorage.setItem("key", state.key);
  connect();
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  $("drop").addEventListener(kind, (event) => {
    event.preventDefault();
    $("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop") choose(event.dataTransfer.files[0]);
  });
}
document.addEventListener("paste", (event) => {
  const file = [...event.clipboardData.files].find((f) => f.type.startsWith("image/"));
  if (file) choose(file);
});

connect();
setInterval(look, 5000);
