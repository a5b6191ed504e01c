// Line charts and heat maps on a canvas, in the colours of the page's theme. No data is fetched here.

const style = () => getComputedStyle(document.documentElement);
export const color = (name) => style().getPropertyValue("--" + name).trim();

function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  if (height) canvas.style.height = height + "px";
  const h = canvas.clientHeight;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(h * ratio);
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  return { g, width, height: h };
}

// A round number that is at least v.
function roundUp(v) {
  const power = Math.pow(10, Math.floor(Math.log10(v)));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((m) => m * power).find((m) => m >= v * 0.999);
}

// series: [{values: [number or null, oldest first], color}], all of the same length; format: number -> text; seconds: span shown.
export function lineChart(canvas, series, format, seconds) {
  const { g, width, height } = prepare(canvas);
  const left = 52, right = 8, top = 8, bottom = 20;
  const most = Math.max(...series.flatMap((s) => s.values.map((v) => v || 0)), 0);
  const top_value = most > 0 ? roundUp(most) : 1;
  const n = Math.max(...series.map((s) => s.values.length));
  const x = (i) => left + (width - left - right) * (n > 1 ? i / (n - 1) : 1);
  const y = (v) => height - bottom - (height - top - bottom) * v / top_value;
  g.clearRect(0, 0, width, height);
  g.lineWidth = 1;
  g.textBaseline = "middle";
  for (let k = 0; k <= 2; k++) {
    const v = top_value * k / 2, at = Math.round(y(v)) + 0.5;
    g.strokeStyle = color("line");
    g.beginPath();
    g.moveTo(left, at);
    g.lineTo(width - right, at);
    g.stroke();
    g.fillStyle = color("soft");
    g.textAlign = "right";
    g.fillText(format(v), left - 8, at);
  }
  g.textBaseline = "alphabetic";
  g.textAlign = "left";
  g.fillText(seconds + " s ago", left, height - 4);
  g.textAlign = "right";
  g.fillText("now", width - right, height - 4);
  for (const s of series) {
    g.strokeStyle = s.color;
    g.lineWidth = 1.8;
    g.lineJoin = "round";
    g.beginPath();
    let open = false;
    s.values.forEach((v, i) => {
      if (v === null) { open = false; return; }
      if (open) g.lineTo(x(i), y(v)); else g.moveTo(x(i), y(v));
      open = true;
    });
    g.stroke();
  }
}

function mix(a, b, t) {
  const hex = (c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16));
  const [p, q] = [hex(a), hex(b)];
  return p.map((v, i) => Math.round(v + (q[i] - v) * t));
}

function ramp() {
  const stops = ["heat0", "heat1", "heat2", "heat3"].map(color);
  return (t) => {
    const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1), i = Math.min(Math.floor(at), stops.length - 2);
    return mix(stops[i], stops[i + 1], at - i);
  };
}

const luminance = (c) => 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2];

// A heat map that can be read with the mouse and with the arrow keys. describe(row, col): the text for readout.
export class HeatMap {
  constructor(canvas, readout, names, describe) {
    Object.assign(this, { canvas, readout, names, describe, rows: [], cell: null, hovered: false });
    canvas.addEventListener("mousemove", (e) => this.point(e));
    canvas.addEventListener("mouseleave", () => { this.hovered = false; this.select(null); });
    canvas.addEventListener("keydown", (e) => this.key(e));
    canvas.addEventListener("blur", () => { if (!this.hovered) this.select(null); });
  }

  layout() {
    const left = 56, top = 4, bottom = 20, n_rows = this.rows.length, n_cols = n_rows ? this.rows[0].length : 0;
    const all = n_cols ? (this.canvas.clientWidth - left - 2) / n_cols : 0, w = this.square ? Math.min(all, 120) : all;
    const h = this.square ? Math.min(36, Math.max(18, w / 2)) : Math.min(26, Math.max(9, 300 / Math.max(n_rows, 1)));
    return { left, top, bottom, n_rows, n_cols, w, h };
  }

  draw(rows) {
    this.rows = rows;
    const l = this.layout();
    const { g } = prepare(this.canvas, l.top + l.h * l.n_rows + l.bottom);
    const most = Math.max(...rows.map((r) => Math.max(...r)), 0), shade = ramp(), gap = l.w > 5 ? 1 : 0;
    const least = this.square || !rows.length ? 0 : Math.min(...rows.map((r) => Math.min(...r))); // differences of load are what one looks for
    this.range = { least, most };
    g.textBaseline = "middle";
    rows.forEach((row, r) => row.forEach((v, c) => {
      const share = most > least ? (v - least) / (most - least) : most > 0 ? 0.5 : 0;
      const rgb = shade(this.square ? 0.67 * share : share);
      g.fillStyle = `rgb(${rgb})`;
      g.fillRect(l.left + c * l.w, l.top + r * l.h, l.w - gap, l.h - gap);
      if (!this.square || l.w < 44) return;
      g.fillStyle = luminance(rgb) > 128 ? "#10151c" : "#f5f7fa";
      g.textAlign = "center";
      g.fillText(Math.round(v).toLocaleString("en"), l.left + (c + 0.5) * l.w, l.top + (r + 0.5) * l.h);
    }));
    this.labels(g, l);
    if (this.cell) this.frame(g, l);
  }

  labels(g, l) {
    const every_row = Math.ceil(13 / l.h), every_col = Math.ceil(26 / l.w);
    g.fillStyle = color("soft");
    g.textAlign = "right";
    for (let r = 0; r < l.n_rows; r += every_row) g.fillText(this.names[0] + " " + r, l.left - 6, l.top + (r + 0.5) * l.h);
    g.textAlign = "center";
    for (let c = 0; c < l.n_cols; c += every_col) g.fillText(this.names[1] + c, l.left + (c + 0.5) * l.w, l.top + l.n_rows * l.h + 10);
  }

  frame(g, l) {
    g.strokeStyle = color("text");
    g.lineWidth = 2;
    g.strokeRect(l.left + this.cell.c * l.w, l.top + this.cell.r * l.h, l.w - 1, l.h - 1);
  }

  select(cell) {
    this.cell = cell;
    if (this.rows.length) this.draw(this.rows);
    this.say();
  }

  say() {
    const text = this.describe(this.cell);
    if (this.readout.textContent !== text) this.readout.textContent = text;
  }

  point(e) {
    const l = this.layout(), box = this.canvas.getBoundingClientRect();
    const c = Math.floor((e.clientX - box.left - l.left) / l.w), r = Math.floor((e.clientY - box.top - l.top) / l.h);
    this.hovered = c >= 0 && c < l.n_cols && r >= 0 && r < l.n_rows;
    this.select(this.hovered ? { r, c } : null);
  }

  key(e) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[e.key], l = this.layout();
    if (e.key === "Escape") this.select(null);
    if (!step || !l.n_rows) return;
    e.preventDefault();
    const at = this.cell || { r: step[0] < 0 ? l.n_rows : step[0] ? -1 : 0, c: step[1] < 0 ? l.n_cols : step[1] ? -1 : 0 };
    this.select({ r: Math.min(Math.max(at.r + step[0], 0), l.n_rows - 1), c: Math.min(Math.max(at.c + step[1], 0), l.n_cols - 1) });
  }
}
