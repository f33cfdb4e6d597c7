"use strict";
(() => {
  const D = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page"), tip = document.getElementById("tip");
  const NS = "http://www.w3.org/2000/svg";
  const css = (n) => getComputedStyle(document.documentElement).getPropertyValue(n).trim();
  const C = (i) => `var(--c${i % 10})`;
  const GiB = (b) => (b / 2 ** 30).toFixed(1) + " GiB";
  const time = (s) => s >= 100 ? s.toFixed(0) + " s" : s >= 1 ? s.toPrecision(3) + " s"
    : s >= 1e-3 ? (s * 1e3).toPrecision(3) + " ms" : (s * 1e6).toPrecision(3) + " us";
  const si = (v) => { for (const [f, u] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (v >= f) return +(v / f).toPrecision(3) + " " + u; return +v.toPrecision(3) + " "; };

  function el(tag, attrs = {}, ...kids) {
    const svg = ["svg", "g", "rect", "line", "path", "text", "circle", "tspan"].includes(tag);
    const e = svg ? document.createElementNS(NS, tag) : document.createElement(tag);
    for (const [k, v] of Object.entries(attrs)) {
      if (k === "tip") { e.setAttribute("data-tip", v); e.setAttribute("tabindex", "0"); }
      else if (k === "text") e.textContent = v;
      else if (k.startsWith("on")) e.addEventListener(k.slice(2), v);
      else e.setAttribute(k, v);
    }
    e.append(...kids.filter((k) => k !== null && k !== undefined));
    return e;
  }

  // one tooltip for pointer, keyboard and touch
  function show(text, x, y) {
    tip.textContent = text; tip.style.display = "block";
    const r = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 12, innerWidth - r.width - 6)) + "px";
    tip.style.top = (y + 18 + r.height > innerHeight ? Math.max(4, y - r.height - 10) : y + 18) + "px";
  }
  const hide = () => { tip.style.display = "none"; };
  document.addEventListener("pointermove", (e) => {
    const t = e.target.closest && e.target.closest("[data-tip]");
    if (t) show(t.getAttribute("data-tip"), e.clientX, e.clientY);
    else if (e.target.tagName !== "CANVAS") hide();
  });
  document.addEventListener("focusin", (e) => {
    const t = e.target.closest("[data-tip]"); if (!t) return;
    const r = t.getBoundingClientRect(); show(t.getAttribute("data-tip"), r.left, r.bottom - 14);
  });
  document.addEventListener("focusout", hide);
  addEventListener("scroll", hide, { passive: true });

  const redraw = [];
  function section(id, title, source, ...kids) {
    const head = el("h2", { text: title });
    if (source) head.setAttribute("data-tip", "source: " + source), head.setAttribute("tabindex", "0");
    const s = el("section", { id }, head, ...kids);
    return s;
  }
  function chart(host, draw) {
    const run = () => { const w = Math.max(260, host.clientWidth); host.replaceChildren(draw(w)); };
    redraw.push(run); return run;
  }
  const svg = (w, h, label, ...kids) => el("svg", { viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": label }, ...kids);
  const text = (x, y, t, a = {}) => el("text", { x, y, text: t, ...a });

  // ---- head
  const bad = D.memory.stages.some((s, k) => s.reduce((a, b) => a + b, 0) > D.memory.limits[k]);
  page.append(
    el("header", {}, el("h1", { text: D.title }), el("button", { id: "theme", text: "light / dark", onclick: () => {
      const root = document.documentElement;
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark"; redraw.forEach((f) => f()); } })),
    el("p", { class: "verdict" + (bad ? " bad" : ""), id: "verdict", text: D.verdict }),
    section("facts", "Model, cluster, workload", "", el("dl", {}, ...D.facts.flatMap((f) =>
      [el("dt", { text: f.label }), el("dd", { text: f.value, tip: "source: " + f.source })]))));

  // ---- memory
  const memHost = el("div"), memLegend = el("div", { class: "legend" });
  D.memory.lines.forEach((n, i) => { if (D.memory.stages.some((s) => s[i] > 0))
    memLegend.append(el("span", {}, el("i", { style: `background:${C(i)}` }), n)); });
  const drawMem = chart(memHost, (w) => {
    const n = D.memory.stages.length, row = n > 24 ? 14 : 24, left = 64, right = 76;
    const top = Math.max(...D.memory.limits, ...D.memory.stages.map((s) => s.reduce((a, b) => a + b, 0)));
    const X = (b) => left + (w - left - right) * b / top, g = [];
    D.memory.stages.forEach((lines, k) => {
      let at = 0; const y = k * row + 2, sum = lines.reduce((a, b) => a + b, 0);
      g.push(text(0, y + row / 2 + 2, "stage " + k, { class: "soft" }));
      lines.forEach((v, i) => { if (v <= 0) return;
        g.push(el("rect", { x: X(at), y, width: Math.max(.5, X(at + v) - X(at)), height: row - 5, fill: C(i), class: "mem",
          tip: `stage ${k}: ${D.memory.lines[i]} ${GiB(v)} of ${GiB(sum)}\npeak at: ${D.memory.moments[k] || "-"}\nsource: ${D.sources.memory}` }));
        at += v; });
      const over = sum > D.memory.limits[k];
      g.push(text(X(top) + 6, y + row / 2 + 2, GiB(sum), over ? { style: "fill:var(--bad);font-weight:700" } : {}));
      const lx = X(D.memory.limits[k]);
      g.push(el("line", { x1: lx, x2: lx, y1: y - 2, y2: y + row - 3, style: "stroke:var(--bad);stroke-width:2" }));
    });
    return svg(w, n * row + 6, "memory per stage against the limit", ...g);
  });

  // ---- waterfall
  const fallHost = el("div");
  const drawFall = chart(fallHost, (w) => {
    const rows = D.waterfall, row = 26, narrow = w < 520, left = narrow ? 8 : 210, right = 118;
    const total = rows.reduce((a, r) => a + r.seconds, 0), h = narrow ? 40 : row;
    const X = (s) => left + (w - left - right) * s / total, g = []; let at = 0;
    rows.forEach((r, i) => {
      const y = i * h, share = (100 * r.seconds / total).toFixed(1) + "%", by = narrow ? y + 16 : y + 4;
      g.push(text(narrow ? 8 : left - 8, narrow ? y + 12 : y + 18, r.label, narrow ? {} : { "text-anchor": "end" }));
      g.push(el("rect", { x: X(at), y: by, width: Math.max(1, X(at + r.seconds) - X(at)), height: 18, rx: 2, class: "fall",
        fill: i ? C(i === 1 ? 4 : i) : "var(--good)", tip: `${r.label}: ${time(r.seconds)}, ${share} of the step\nsource: ${r.source}` }));
      g.push(text(X(at + r.seconds) + 5, by + 13, `${time(r.seconds)}  ${share}`, { class: "soft" }));
      at += r.seconds;
    });
    const y = rows.length * h;
    g.push(el("rect", { x: left, y: y + (narrow ? 16 : 4), width: X(total) - left, height: 18, rx: 2, fill: "var(--c6)", class: "fall",
      tip: `the step: ${time(total)}\nsource: ${D.sources.waterfall}` }));
    g.push(text(narrow ? 8 : left - 8, narrow ? y + 12 : y + 18, "real step", narrow ? {} : { "text-anchor": "end" }));
    g.push(text(X(total) + 5, y + (narrow ? 29 : 17), time(total)));
    return svg(w, y + h + 4, "from ideal compute to the real step", ...g);
  });
  page.append(el("div", { class: "two" },
    section("memory", "Memory per stage", D.sources.memory, memLegend, memHost, el("p", { class: "note", text: "red line: the limit" })),
    section("waterfall", "Where the step's time goes", D.sources.waterfall, fallHost)));

  // ---- timeline
  const T = D.timeline, canvas = el("canvas", { id: "canvas", "aria-label": "pipeline timeline", role: "img" });
  let view = [0, T.total_us];
  const KIND = ["forward", "backward", "weight gradients"];
  function bounds() { const span = Math.max(view[1] - view[0], T.total_us / 1e5);
    const a = Math.min(Math.max(0, view[0]), T.total_us - Math.min(span, T.total_us)); view = [a, Math.min(T.total_us, a + span)]; }
  const rowH = () => Math.max(6, Math.min(34, 420 / T.pieces.length));
  function drawTime() {
    const w = canvas.clientWidth || 600, h = T.pieces.length * rowH() + 22, r = devicePixelRatio || 1;
    canvas.width = w * r; canvas.height = h * r; canvas.style.height = h + "px";
    const g = canvas.getContext("2d"); g.scale(r, r);
    const colour = [css("--c0"), css("--c1"), css("--c3")], X = (t) => (t - view[0]) / (view[1] - view[0]) * w;
    g.fillStyle = css("--bg"); g.fillRect(0, 0, w, h);
    T.pieces.forEach((line, k) => {
      const y = k * rowH();
      let lo = 0, hi = line.length; // first piece that ends inside the view
      while (lo < hi) { const m = (lo + hi) >> 1; if (line[m][3] + line[m][4] < view[0]) lo = m + 1; else hi = m; }
      for (let i = lo; i < line.length && line[i][3] < view[1]; i++) {
        const p = line[i], x = X(p[3]), b = X(p[3] + p[4]) - x;
        g.fillStyle = colour[p[0]]; g.globalAlpha = p[2] % 2 ? .72 : 1;
        g.fillRect(x, y + 1, Math.max(.4, b - (b > 4 ? .8 : 0)), rowH() - 2);
        if (b > 22 && rowH() > 11) { g.globalAlpha = 1; g.fillStyle = "#fff"; g.font = "10px sans-serif"; g.fillText("FBW"[p[0]] + p[1], x + 3, y + rowH() / 2 + 4); }
      }
      g.globalAlpha = 1; let at = T.pipeline_us;
      T.after.forEach(([, d], i) => { g.fillStyle = css(i === T.after.length - 1 ? "--c4" : "--c7"); g.fillRect(X(at), y + 1, Math.max(.5, X(at + d) - X(at)), rowH() - 2); at += d; });
      if (rowH() > 11) { g.fillStyle = css("--soft"); g.font = "10px sans-serif"; }
    });
    g.fillStyle = css("--soft"); g.font = "11px sans-serif";
    for (let i = 0; i <= 5; i++) { g.textAlign = i === 0 ? "left" : i === 5 ? "right" : "center";
      g.fillText(time((view[0] + (view[1] - view[0]) * i / 5) / 1e6), w * i / 5, h - 6); }
    g.textAlign = "left"; canvas.dataset.view = view.map((v) => Math.round(v)).join("-");
  }
  const zoom = (f, at = .5) => { const c = view[0] + (view[1] - view[0]) * at, s = (view[1] - view[0]) * f;
    view = [c - s * at, c + s * (1 - at)]; bounds(); drawTime(); };
  canvas.addEventListener("wheel", (e) => { if (!e.ctrlKey && Math.abs(e.deltaX) > Math.abs(e.deltaY)) return;
    e.preventDefault(); zoom(e.deltaY > 0 ? 1.25 : .8, e.offsetX / canvas.clientWidth); }, { passive: false });
  const touch = new Map(); let pinch = 0;
  canvas.addEventListener("pointerdown", (e) => { touch.set(e.pointerId, e.clientX); canvas.setPointerCapture(e.pointerId); });
  for (const n of ["pointerup", "pointercancel"]) canvas.addEventListener(n, (e) => { touch.delete(e.pointerId); pinch = 0; });
  canvas.addEventListener("pointermove", (e) => {
    if (touch.has(e.pointerId)) {
      const before = touch.get(e.pointerId); touch.set(e.pointerId, e.clientX);
      if (touch.size === 2) { const [a, b] = [...touch.values()], d = Math.abs(a - b); if (pinch && d) zoom(pinch / d); pinch = d; return; }
      const d = (before - e.clientX) / canvas.clientWidth * (view[1] - view[0]);
      view = [view[0] + d, view[1] + d]; bounds(); drawTime();
    }
    const k = Math.floor(e.offsetY / rowH()), t = view[0] + e.offsetX / canvas.clientWidth * (view[1] - view[0]);
    const p = (T.pieces[k] || []).find((q) => q[3] <= t && t < q[3] + q[4]);
    let label = p ? `stage ${k}: ${KIND[p[0]]} of micro-batch ${p[1]}, chunk ${p[2]}\n${time(p[4] / 1e6)} from ${time(p[3] / 1e6)}` : "";
    if (!p && t > T.pipeline_us) { let at = T.pipeline_us; for (const [n, d] of T.after) { if (t < at + d) { label = `${n}: ${time(d / 1e6)}`; break; } at += d; } }
    if (!p && !label && T.pieces[k]) label = `stage ${k} waits`;
    label ? show(label + "\nsource: " + D.sources.timeline, e.clientX, e.clientY) : hide();
  });
  canvas.addEventListener("pointerleave", hide);
  redraw.push(drawTime);
  const btn = (t, f, id) => el("button", { text: t, onclick: f, id });
  page.append(section("timeline", "Pipeline timeline", D.sources.timeline,
    el("div", { class: "bar" }, btn("+", () => zoom(.5), "zoomin"), btn("\u2212", () => zoom(2), "zoomout"),
      btn("start", () => { const s = view[1] - view[0]; view = [0, Math.min(s, T.total_us / 12)]; bounds(); drawTime(); }, "gostart"),
      btn("end", () => { const s = Math.min(view[1] - view[0], T.total_us / 12); view = [T.total_us - s, T.total_us]; bounds(); drawTime(); }, "goend"),
      btn("whole step", () => { view = [0, T.total_us]; drawTime(); }, "whole"),
      el("span", { class: "legend" }, ...KIND.slice(0, T.pieces.some((l) => l.some((p) => p[0] === 2)) ? 3 : 2).map((n, i) =>
        el("span", {}, el("i", { style: `background:var(--c${[0, 1, 3][i]})` }), n)))),
    canvas, el("p", { class: "note", text: `A row is a stage; wheel or pinch zooms, dragging moves. The simulator takes ${time(T.total_us / 1e6)}, the plan's closed form ${time(T.closed_us / 1e6)}.` +
      (T.cut ? ` ${T.cut} later pieces are left out; \`planner trace\` has them all.` : "") })));

  // ---- roofline
  if (D.roofline && D.roofline.ops.length) {
    const R = D.roofline, host = el("div");
    chart(host, (w) => {
      const h = Math.min(420, w * .62), l = 62, r = 14, t = 10, b = 38, log = Math.log10;
      const xs = R.ops.map((o) => o.intensity), knee = R.peak / R.hbm;
      const x0 = Math.floor(log(Math.min(...xs, .1))), x1 = Math.ceil(log(Math.max(...xs, knee * 8)));
      const y1 = Math.ceil(log(R.peak) + .1), y0 = Math.floor(log(Math.min(...R.ops.map((o) => o.rate))));
      const X = (v) => l + (w - l - r) * (log(v) - x0) / (x1 - x0), Y = (v) => h - b - (h - b - t) * (log(v) - y0) / (y1 - y0), g = [];
      for (let i = x0; i <= x1; i++) { g.push(el("line", { x1: X(10 ** i), x2: X(10 ** i), y1: t, y2: h - b, class: "grid" })); g.push(text(X(10 ** i), h - b + 16, "" + +(10 ** i).toPrecision(1), { class: "soft", "text-anchor": "middle" })); }
      for (let i = y0; i <= y1; i++) { g.push(el("line", { x1: l, x2: w - r, y1: Y(10 ** i), y2: Y(10 ** i), class: "grid" })); g.push(text(l - 6, Y(10 ** i) + 4, si(10 ** i), { class: "soft", "text-anchor": "end" })); }
      g.push(text((l + w) / 2, h - 4, "FLOPs per byte of operands", { class: "soft", "text-anchor": "middle" }));
      const yb = Math.max(10 ** y0, 10 ** x0 * R.hbm);
      g.push(el("path", { d: `M${X(yb / R.hbm)},${Y(yb)}L${X(knee)},${Y(R.peak)}L${w - r},${Y(R.peak)}`, style: "fill:none;stroke:var(--ink);stroke-width:2",
        tip: `${R.device}: ${si(R.hbm)}B/s and ${si(R.peak)}FLOP/s dense ${R.dtype}\nsource: ${((D.provenance.sources[R.device] || [])[0]) || "datasheet"}` }));
      R.ops.slice().reverse().forEach((o) => g.push(el("circle", { cx: X(o.intensity), cy: Y(o.rate), r: 4 + 26 * Math.sqrt(o.share), class: "op",
        style: `fill:${o.kind.includes("gemm") || o.kind === "conv" ? "var(--c0)" : o.kind === "attention" ? "var(--c3)" : "var(--c1)"};fill-opacity:.65;stroke:var(--bg)`,
        tip: `${o.name} (${o.kind})\n${(100 * o.share).toFixed(1)}% of compute, ${time(o.seconds)} a micro-batch\n${si(o.rate)}FLOP/s at ${o.intensity.toPrecision(3)} FLOPs/byte\nsource: ${D.sources.roofline}` })));
      const used = [];
      R.ops.slice(0, 8).forEach((o) => {
        const name = o.name.split("/").pop(), x = Math.min(X(o.intensity), w - 7 * name.length - 4), y = Y(o.rate) + 18 + 26 * Math.sqrt(o.share);
        if (used.some(([a, b]) => Math.abs(a - x) < 110 && Math.abs(b - y) < 15)) return;
        used.push([x, y]); g.push(text(x, Math.min(y, h - b - 4), name)); });
      g.push(text(l + 4, t + 12, "FLOP/s", { class: "soft" }));
      return svg(w, h, "roofline", ...g);
    });
    page.append(section("roofline", "Roofline: the heaviest ops", D.sources.roofline,
      el("div", { class: "legend" }, ...[["matrix products", 0], ["attention", 3], ["memory-bound", 1]].map(([n, i]) => el("span", {}, el("i", { style: `background:${C(i)}` }), n))), host,
      el("p", { class: "note", text: "area: share of the compute time; one rank, one micro-batch, forward and backward" })));
  }

  // ---- block graph
  if (D.blocks.length) {
    const host = el("div", { class: "scroll" }), pick = el("select", { id: "block", "aria-label": "block" },
      ...D.blocks.map((b, i) => el("option", { value: i, text: b.name + (b.layers ? ` (layers ${b.layers})` : "") })));
    const draw = chart(host, (w0) => {
      const B = D.blocks[+pick.value], w = Math.max(w0, 430), row = 46, x = 96, g = [], Y = (i) => i * row + 8;
      const arrow = el("g", {});
      B.ops.forEach((o, i) => o.from.forEach((j) => { const d = i - j, bend = Math.min(80, 10 + d * 7);
        arrow.append(el("path", { d: d === 1 ? `M${x + 30},${Y(j) + 34}V${Y(i)}` : `M${x},${Y(j) + 17}C${x - bend},${Y(j) + 17} ${x - bend},${Y(i) + 17} ${x},${Y(i) + 17}`,
          style: "fill:none;stroke:var(--soft);stroke-width:1.4" })); }));
      g.push(arrow);
      B.ops.forEach((o, i) => {
        const detail = [`${o.name}: ${o.target}`, ...o.in.map((p) => `reads ${p[0]} [${p[1]}] ${p[2]}`), ...o.out.map((p) => `writes ${p[0]} [${p[1]}] ${p[2]}`), "source: " + D.sources.block].join("\n");
        const sharded = o.out.some((p) => p[2] !== "R"), bw = Math.min(300, w * .46);
        g.push(el("rect", { x, y: Y(i), width: bw, height: 34, rx: 5, class: "node-op", tip: detail, style: `fill:var(--bg);stroke:${sharded ? "var(--c0)" : "var(--line)"};stroke-width:1.6` }));
        g.push(text(x + 8, Y(i) + 14, o.name, { "pointer-events": "none" }));
        g.push(text(x + 8, Y(i) + 28, o.out.map((p) => p[2]).join("; "), { class: "soft", "pointer-events": "none" }));
        if (o.calls.length) { g.push(el("rect", { x: x + bw + 8, y: Y(i) + 6, width: 10, height: 22, rx: 3, fill: "var(--c1)", class: "call", tip: o.calls.join("\n") + "\nsource: collectives of the plan" }));
          const kinds = [...new Set(o.calls.map((c) => c.split(" ").slice(0, 2).join(" ")))];
          g.push(text(x + bw + 24, Y(i) + 21, kinds.join(", ").slice(0, Math.max(10, (w - x - bw - 24) / 6.4)), { class: "soft" })); }
      });
      const s = svg(w, B.ops.length * row + 8, "ops of a block", ...g); s.style.minWidth = w + "px"; return s;
    });
    pick.addEventListener("change", draw);
    page.append(section("blocks", "Block graph: placements and collectives", D.sources.block, el("div", { class: "bar" }, pick), host,
      el("p", { class: "note", text: "blue frame: the output is divided or partial; orange: collectives at that op" })));
  }

  // ---- topology
  const P = D.topology, coords = (rank) => { const c = []; let v = rank; for (let i = P.sizes.length - 1; i >= 0; i--) { c[i] = v % P.sizes[i]; v = Math.floor(v / P.sizes[i]); } return c; };
  const many = P.nodes.slice(0, 128), spans = [];
  const nodes = el("div", { class: "nodes" }, ...many.map((n, i) => el("div", { class: "node" }, el("b", { text: `node ${i}: ${n.gpus} x ${n.device}` }),
    el("div", { class: "gpus" }, ...Array.from({ length: n.gpus }, (_, g) => { const rank = n.first + g, c = coords(rank);
      const s = el("span", { text: rank, style: `background:${C(c[0])}`, tip: `rank ${rank}: ${P.axes.map((a, k) => `${a} ${c[k]}`).join(", ")}\nstage ${c[0]}, ${GiB((D.memory.stages[c[0]] || [0]).reduce((x, y) => x + y, 0))}\nsource: ${D.sources.topology}` });
      spans.push([s, c]); s.addEventListener("click", () => spans.forEach(([o, d]) => o.classList.toggle("on", +axis.value < 0 ? false : P.axes.every((_, k) => k === +axis.value || d[k] === c[k])))); return s; })))));
  const axis = el("select", { id: "axis", "aria-label": "axis" }, ...P.axes.map((a, i) => [a, i]).filter(([, i]) => P.sizes[i] > 1).map(([a, i]) => el("option", { value: i, text: `${a} (${P.sizes[i]})` })));
  const trafficHost = el("div");
  chart(trafficHost, (w) => {
    const top = Math.max(...P.traffic.map((t) => t.bytes), 1), row = 40, g = [];
    P.traffic.forEach((t, i) => { const y = i * row;
      g.push(text(0, y + 13, `${t.axis} (${t.size} ranks), ${t.inside ? "inside a node over " + P.link : "between nodes over " + P.network}`));
      g.push(el("rect", { x: 0, y: y + 18, width: Math.max(2, (w - 190) * t.bytes / top), height: 14, rx: 2, fill: t.inside ? "var(--c2)" : "var(--c1)", class: "traffic",
        tip: `${t.axis}: ${si(t.bytes)}B in collectives of a step per GPU on its busiest stage, ${time(t.seconds)} if none were hidden\nsource: ${D.sources.topology}` }));
      g.push(text(Math.max(2, (w - 190) * t.bytes / top) + 6, y + 30, `${si(t.bytes)}B, ${time(t.seconds)}`, { class: "soft" })); });
    return svg(w, Math.max(1, P.traffic.length) * row, "traffic by axis", ...g);
  });
  page.append(section("topology", "Topology: ranks and traffic", D.sources.topology,
    el("div", { class: "bar" }, el("span", { class: "note", text: "colour: stage; click a rank to see its group on" }), axis), nodes,
    P.nodes.length > many.length ? el("p", { class: "note", text: `${P.nodes.length - many.length} more nodes like these` }) : null,
    P.traffic.length ? el("h2", { text: "Traffic per GPU and step", style: "margin-top:14px" }) : null, trafficHost));

  // ---- alternatives
  if (D.alternatives.length) {
    const top = Math.max(...D.alternatives.filter((a) => a.fits).map((a) => a.seconds));
    const best = D.alternatives[0].seconds;
    page.append(section("alternatives", "Alternatives, and why each lost", D.sources.alternatives, el("div", { class: "scroll" }, el("table", {},
      el("tr", {}, ...["split", "step", "", "why"].map((t) => el("th", { text: t }))),
      ...D.alternatives.map((a) => el("tr", { class: a.mine ? "mine" : "" }, el("td", { text: a.label }),
        el("td", { text: a.fits ? time(a.seconds) : "does not fit", tip: "source: " + D.sources.alternatives, style: "white-space:nowrap" }),
        el("td", { style: "width:22%;min-width:90px" }, a.fits ? el("div", { style: `height:12px;border-radius:2px;width:${100 * a.seconds / top}%;background:var(--${a.mine ? "good" : "c6"})` }) : null),
        el("td", { text: a.mine ? "" : (a.fits ? `${(100 * (a.seconds / best - 1)).toFixed(1)}% slower: ` : "") + a.why.replace(/^[\d.]+% slower: /, "") })))))));
  }
  if (D.warnings.length || D.notes.length) page.append(section("warnings", "Warnings", "", el("ul", {}, ...[...D.warnings, ...D.notes].map((t) => el("li", { text: t })))));
  page.append(section("why", "In words", "", ...D.explanation.filter((s) => s.title !== "Warnings").map((s) => el("details", {}, el("summary", { text: s.title }), el("ul", {}, ...s.lines.map((t) => el("li", { text: t })))))));
  const prov = D.provenance;
  page.append(section("sources", "Where the numbers are from", "", el("p", { class: "note", text: `parallel-planner ${prov.planner}, torch ${prov.torch}` + (prov.solver ? `, OR-Tools ${prov.solver}` : "") + `, software profile ${prov.stack}` }),
    el("ul", {}, ...Object.entries(prov.sources).map(([k, v]) => el("li", { text: `${k}: ${v.join("; ")}` })))));

  let width = 0, due = 0;
  const all = () => redraw.forEach((f) => f());
  addEventListener("resize", () => { if (innerWidth === width) return; width = innerWidth; cancelAnimationFrame(due); due = requestAnimationFrame(all); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  all(); width = innerWidth;
  document.documentElement.dataset.ready = "yes";
})();
