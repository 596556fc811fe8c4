"""The explorers in a real browser: JupyterLab on a random port with a token, Chromium, keyboard and uploads.

A test for another notebook of nbs/explore takes the fixture `lab` and calls `lab.open(name)`: it gets a page on which all cells have run."""
import json, os, re, shutil, signal, socket, statistics, subprocess, sys, time, urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np, pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
OUT = ROOT/'out'
ARGS = '--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync --no-first-run'.split()
SETTINGS = {'@jupyterlab/apputils-extension:notification': {'fetchNews': 'false', 'checkForUpdates': False}, # no popup
            '@jupyterlab/notebook-extension:tracker': {'windowingMode': 'none'}} # cells out of sight stay on the page

def missing():
    "Why there can be no browser here; '' if there can."
    try: import playwright
    except ImportError: return 'the package playwright is not installed: pip install playwright'
    return '' if chromium() else 'there is no Chromium: apt-get install chromium, or set CHROMIUM to its path'

def chromium(): return os.environ.get('CHROMIUM') or next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)

def free_port():
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); return s.getsockname()[1]

def until(f, what, seconds=90):
    "The first true value of f()."
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := f(): return value
        time.sleep(.2)
    raise AssertionError(f'{what} did not happen in {seconds} s')

class Lab:
    "A JupyterLab of its own on copies of the explorers, and a browser."
    def __init__(self, home, browser):
        self.home, self.browser, self.port, self.token = home, browser, free_port(), os.urandom(16).hex()
        shutil.copytree(ROOT/'nbs'/'explore', home/'nbs'/'explore', ignore=shutil.ignore_patterns('.ipynb_checkpoints'))
        shutil.copy(ROOT/'settings.ini', home) # so that runs, data and out are those of this folder
        for name in ('settings', 'user', 'workspaces'): (home/name).mkdir()
        (home/'settings'/'overrides.json').write_text(json.dumps(SETTINGS))
        env = os.environ | dict(JUPYTER_CONFIG_DIR=str(home/'config'), JUPYTER_RUNTIME_DIR=str(home/'runtime'), IPYTHONDIR=str(home/'ipython'), OMP_NUM_THREADS='1', OMP_WAIT_POLICY='PASSIVE')
        self.server = subprocess.Popen([BIN/'jupyter', 'lab', '--no-browser', '--allow-root', '--ip=127.0.0.1', f'--port={self.port}', '--ServerApp.port_retries=0', f'--IdentityProvider.token={self.token}',
            f'--ServerApp.root_dir={home}', f'--LabApp.app_settings_dir={home/"settings"}', f'--LabApp.user_settings_dir={home/"user"}', f'--LabApp.workspaces_dir={home/"workspaces"}'],
            cwd=home, env=env, stdout=open(home/'lab.log', 'w'), stderr=subprocess.STDOUT, start_new_session=True)
        until(lambda: self.get('api/status'), 'JupyterLab', 60)

    def get(self, path):
        "JSON from the server, or None."
        try: return json.load(urllib.request.urlopen(f'http://127.0.0.1:{self.port}/{path}?token={self.token}', timeout=5))
        except OSError: return None

    def ready(self, name):
        "Has the notebook a kernel that is idle and connected? The toolbar says idle before there is one."
        return any(name in o['path'] and o['kernel']['execution_state'] == 'idle' and o['kernel']['connections'] > 0 for o in self.get('api/sessions') or [])

    def open(self, name):
        "A page with all cells of nbs/explore/<name>.ipynb run."
        page = self.browser.new_page(viewport=dict(width=1500, height=1500))
        page.goto(f'http://127.0.0.1:{self.port}/lab/tree/nbs/explore/{name}.ipynb?token={self.token}')
        page.wait_for_selector('.jp-Notebook .jp-Cell', timeout=60_000)
        until(lambda: self.ready(name), 'an idle and connected kernel')
        page.locator('.lm-MenuBar-itemLabel', has_text='Run').first.click()
        page.locator('.lm-Menu-itemLabel', has_text='Run All Cells').first.click()
        until(lambda: no_error(page) or all(re.fullmatch(r'\[\d+\]:', o.strip()) for o in page.locator('.jp-CodeCell .jp-InputArea-prompt').all_inner_texts()), 'the end of all cells', 150)
        return page # until then the kernel would answer late: it runs one thing at a time

    def close(self):
        os.killpg(self.server.pid, signal.SIGTERM)
        try: self.server.wait(20)
        except subprocess.TimeoutExpired: os.killpg(self.server.pid, signal.SIGKILL); self.server.wait()

@pytest.fixture(scope='module')
def lab(tmp_path_factory):
    if reason := missing():
        if os.environ.get('CI_REQUIRE_BROWSER') == '1': pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium(), args=ARGS)
        lab = Lab(tmp_path_factory.mktemp('lab'), browser)
        try: yield lab
        finally: lab.close(); browser.close()

def digest(page, css):
    "A hash of the bytes of a picture on the page."
    return page.evaluate('''async css => { const bytes = await (await fetch(document.querySelector(css).src)).arrayBuffer();
        return [...new Uint8Array(bytes)].reduce((h, b) => (h*31 + b) >>> 0, bytes.byteLength) }''', css)

@contextmanager
def changes(page, css):
    "Inside, the picture becomes another one."
    before = digest(page, css)
    yield
    until(lambda: digest(page, css) != before, f'a new picture in {css}', 60)

def wait_text(page, css, *words, seconds=60): until(lambda: all(o in page.inner_text(css) for o in words), f'{words} in {css}', seconds)

def no_error(page):
    "No cell and no widget shows an error."
    assert page.locator('[data-mime-type="application/vnd.jupyter.error"], [data-mime-type="application/vnd.jupyter.stderr"]').all_inner_texts() == []
    assert 'Error displaying widget' not in page.inner_text('.jp-Notebook')

def key_to_picture(page, handle, img, key, n=21):
    "Milliseconds from a key press to the new picture, for each of n presses."
    page.evaluate('''img => { window.mg = {}; const o = document.querySelector(img);
        document.addEventListener('keydown', () => window.mg.down = performance.now(), true);
        o.addEventListener('load', () => window.mg.load = performance.now()) }''', img)
    times = []
    for _ in range(n):
        page.evaluate('window.mg.load = null')
        page.locator(handle).press(key)
        page.wait_for_function('window.mg.load !== null', timeout=10_000)
        times.append(page.evaluate('window.mg.load - window.mg.down'))
        page.wait_for_timeout(60) # one event at a time
    return times

def record(name, **numbers):
    "Numbers for people, in out/browser.json."
    OUT.mkdir(exist_ok=True)
    file = OUT/'browser.json'
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | {name: numbers}, indent=1))

def screenshot(page, name):
    (OUT/'screenshots').mkdir(parents=True, exist_ok=True)
    page.screenshot(path=OUT/'screenshots'/f'{name}.png')

def test_heatmaps(lab, tmp_path):
    page = lab.open('heatmaps')
    page.wait_for_selector('img.mg-picture', timeout=90_000)
    wait_text(page, '.mg-numbers', 'p* = 3', 'logit', 'passes of the trunk so far: 1')
    assert page.inner_text('.mg-message').strip() == ''

    handle = '.mg-p .noUi-handle'
    with changes(page, 'img.mg-picture'): page.locator(handle).press('ArrowRight')
    wait_text(page, '.mg-numbers', 'p* = 3.05')
    times = key_to_picture(page, handle, 'img.mg-picture', 'ArrowRight')
    wait_text(page, '.mg-numbers', f'p* = {3.05 + .05*len(times):.4g}', 'so far: 1') # every press counted, the trunk did not run
    record('heatmaps', key_to_picture_ms=round(statistics.median(times)), slowest_ms=round(max(times)), presses=len(times))
    assert statistics.median(times) < 500, times # some 60 ms on a quiet machine; tests run beside each other

    name = page.locator('.mg-label input')
    with changes(page, 'img.mg-picture'): name.fill('Windsor tie'); name.press('Enter')
    wait_text(page, '.mg-numbers', 'Windsor tie: logit', 'so far: 1')
    name.fill('Windsor'); name.press('Enter') # half a name is not sent
    wait_text(page, '.mg-numbers', 'Windsor tie: logit')
    name.fill('Windsor tie'); name.press('Enter')
    with changes(page, 'img.mg-picture'): page.locator('.mg-channel select').select_option(index=2)
    wait_text(page, '.mg-numbers', 'so far: 1')

    with changes(page, 'img.mg-picture'): page.locator('.mg-s .noUi-handle').press('ArrowRight')
    wait_text(page, '.mg-numbers', 's* = 228', 'so far: 2')
    with changes(page, 'img.mg-picture'): page.locator('.mg-shape button', has_text='rectangle').click()
    for _ in range(8): page.locator('.mg-s .noUi-handle').press('PageUp') # each supersedes the one before
    until(lambda: page.inner_text('.mg-message').strip() == '' and f"s* = {page.inner_text('.mg-s .widget-readout').strip()}" in page.inner_text('.mg-numbers'), 'the last resolution')
    screenshot(page, 'heatmaps')

    with changes(page, 'img.mg-picture'): page.locator('.mg-against select').select_option('another p*')
    assert page.locator('.mg-p2').is_visible() and not page.locator('.mg-s2').is_visible()
    screenshot(page, 'heatmaps_compare')
    with changes(page, 'img.mg-picture'): page.locator('.mg-against select').select_option('nothing')

    y, x = np.mgrid[:180, :240]
    file = tmp_path/'my picture.png'
    Image.fromarray(np.stack([x, y, (x*y) % 256], 2).astype(np.uint8)).save(file)
    with changes(page, 'img.mg-picture'):
        with page.expect_file_chooser() as chooser: page.locator('.mg-upload').click()
        chooser.value.set_files(file)
    until(lambda: (page.locator('.mg-image select').input_value() or '').endswith('my picture.png') or 'my picture.png' in page.locator('.mg-image select').inner_text(), 'the upload in the list')
    path = page.locator('.mg-path input')
    path.fill('/not/there.jpg'); path.press('Enter')
    wait_text(page, '.mg-message', '/not/there.jpg', 'neither a file nor')
    page.locator('.mg-image select').select_option('grace_hopper.jpg')
    until(lambda: page.inner_text('.mg-message').strip() == '', 'no message any more')

    page.locator('.mg-copy').click()
    until(lambda: 'figure(View(' in page.locator('.mg-code textarea').input_value(), 'the code')
    page.locator('.mg-png').click()
    wait_text(page, '.mg-message', 'saved as')
    assert list((lab.home/'out').glob('heatmap-*.png')) and len(list((lab.home/'out'/'uploads').iterdir())) == 1
    no_error(page)
    page.close()
