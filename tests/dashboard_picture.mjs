// Takes the picture of the Grafana dashboard that the documentation shows, without a Grafana server: a Prometheus that
// watched a server with some load evaluates the panels, and Grafana's own components draw them.
//
// Copy this file and dashboard_page.jsx to an empty folder. There, with Node 20 or newer and a Chromium:
//
//     npm install react@19 react-dom@19 @grafana/{ui,data}@13.2.3 @fontsource/inter vite@7 playwright-core
//     node dashboard_picture.mjs http://127.0.0.1:9090 grafana_dashboard.json dashboard.png /usr/bin/chromium now-15m
//
// The last word says where the time shown begins; one more says where it ends, such as 2026-11-27T00:20:40Z. Without
// them they are the dashboard's own.

import { existsSync, readFileSync } from "node:fs";
import { chromium } from "playwright-core";
import { createServer } from "vite";

const [prometheus, dashboard, picture, executablePath, from, to] = process.argv.slice(2);
const page = '<body style="margin: 0"><script type="module" src="/dashboard_page.jsx"></script>';
const weights = { Regular: 400, Medium: 500 };

/** Where npm put an icon or a font that a Grafana server has below /public. */
function asset(path) {
  const [, weight] = /^\/public\/fonts\/inter\/Inter-(\w+)\.woff2$/.exec(path) ?? [];
  if (weight) return `node_modules/@fontsource/inter/files/inter-latin-${weights[weight]}-normal.woff2`;
  const icon = `node_modules/@grafana/ui/dist${path.replace("/build/", "/")}`;
  return path.endsWith(".svg") && existsSync(icon) ? icon : undefined;
}

function answer(request, response, next) {
  const path = request.url.split("?")[0];
  const file = path === "/dashboard.json" ? dashboard : asset(path);
  if (file?.endsWith(".svg")) response.setHeader("content-type", "image/svg+xml");
  if (path === "/") response.setHeader("content-type", "text/html").end(page);
  else if (file) response.end(readFileSync(file));
  else next();
}

const proxy = { "/prometheus": { target: prometheus, rewrite: (path) => path.slice("/prometheus".length) } };
const server = await createServer({
  configFile: false,
  logLevel: "error",
  esbuild: { jsx: "automatic" },
  plugins: [{ name: "files", configureServer: ({ middlewares }) => void middlewares.use(answer) }],
  server: { host: "127.0.0.1", hmr: false, proxy },
});
await server.listen();
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
try {
  const tab = await browser.newPage({ viewport: { width: 1600, height: 1000 } });
  const shown = new URLSearchParams({ ...(from && { from }), ...(to && { to }) });
  await tab.goto(`${server.resolvedUrls.local[0]}?${shown}`, { waitUntil: "commit" });
  await tab.waitForFunction(() => window.empty || window.problem, undefined, { timeout: 300_000 });
  const [problem, empty] = await tab.evaluate(() => [window.problem, window.empty]);
  if (problem) throw new Error(problem);
  console.log("panels without data:", empty);
  await tab.waitForTimeout(3000); // until all is drawn
  await tab.screenshot({ path: picture, fullPage: true });
} finally {
  await browser.close();
  await server.close();
}
