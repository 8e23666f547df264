// page.jsx and what it imports as one script: node build.mjs PAGE.JS
import { build } from "esbuild";

await build({
  entryPoints: ["page.jsx"],
  outfile: process.argv[2],
  bundle: true,
  minify: true,
  format: "iife",
  jsx: "automatic",
  loader: { ".ttf": "empty" }, // icons of an editor that no panel shows
  define: { "process.env.NODE_ENV": '"production"', "process.env": "{}", global: "window" },
  logLevel: "error",
});
