// Ask the search of a built site, with the worker that browsers run: node search.js SITE QUERY ...
// It prints the address of the first page for each query, or an empty line.
const fs = require("fs");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const workers = `${site}/assets/javascripts/workers`;
const index = JSON.parse(fs.readFileSync(`${site}/search/search_index.json`));
const listeners = [];
let answered;

Object.assign(global, { self: global, window: global, location: { href: "http://site/" } });
global.importScripts = () => {}; // of other languages than English
global.addEventListener = (type, listener) => listeners.push(listener);
global.postMessage = (message) => answered(message);
vm.runInThisContext(fs.readFileSync(`${workers}/${fs.readdirSync(workers).find((name) => /^search.*\.js$/.test(name))}`));

const ask = (message) =>
  new Promise((resolve) => {
    answered = resolve;
    listeners.forEach((listener) => listener({ data: message }));
  });

(async () => {
  await ask({ type: 0, data: { ...index, options: { suggest: true } } }); // 0: set up, 2: a query
  for (const query of queries) {
    const [first = []] = (await ask({ type: 2, data: query })).data.items;
    console.log(first.length ? first[0].location.split("#")[0] : "");
  }
})();
