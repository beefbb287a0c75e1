// Opens TensorBoard's pages in headless Chromium and prints as JSON what a person would see there.
// node look.mjs URL SCREENSHOT_FOLDER; CHROMIUM names the browser. Not a test: tests/test_tensorboard_browser.py judges.
import { createRequire } from 'node:module';
const { chromium } = createRequire(process.cwd() + '/')('playwright-core');

const [url, folder] = process.argv.slice(2);
const flags = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
  '--disable-component-update', '--disable-sync'];
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: flags });
const seen = {};
const pages = {  // page of TensorBoard: what is there once it is drawn
  custom_scalars: 'tf-custom-scalar-multi-line-chart-card', images: 'tf-image-loader img', text: 'tf-text-loader', hparams: 'tf-hparams-table-view',
};

// All that stands in the page, also inside of components.
function everything() {
  const words = (node) => {
    if (node.nodeType === Node.TEXT_NODE) return node.textContent;
    if (['STYLE', 'SCRIPT', 'TEMPLATE'].includes(node.nodeName)) return '';
    const inner = [...(node.shadowRoot ? node.shadowRoot.childNodes : []), ...node.childNodes];
    return inner.map(words).join(' ');
  };
  return words(document.body).replace(/\s+/g, ' ');
}

for (const [name, drawn] of Object.entries(pages)) {
  const page = await browser.newPage({ viewport: { width: 1500, height: name === 'custom_scalars' ? 3000 : 1500 } });
  await page.goto(`${url}/#${name}`, { waitUntil: 'domcontentloaded' });
  try {
    await page.locator(drawn).first().waitFor({ state: 'attached', timeout: 60000 });
  } catch (error) {
    console.error(`${name}: ${error.message}`);
  }
  await page.waitForTimeout(3000);
  if (name === 'custom_scalars') {
    seen.categories = (await page.locator('tf-category-paginated-view .heading').allInnerTexts()).map((text) => text.split('\n')[0].trim());
  }
  if (name === 'images') {
    seen.images = await page.locator('tf-image-loader img').evaluateAll(
      (all) => all.map((image) => ({ url: image.src, width: image.naturalWidth, height: image.naturalHeight })));
  }
  seen[`${name}_words`] = await page.evaluate(everything);
  await page.screenshot({ path: `${folder}/${name}.png` });
  await page.close();
}
await browser.close();
console.log(JSON.stringify(seen));
