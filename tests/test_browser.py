"""The explorers in a real browser: JupyterLab on a random port with a token, Chromium, keyboard and uploads.

A test for another notebook of nbs/explore takes the fixture `lab` and calls `lab.open(name)`:
it gets a page on which all cells have run."""
import json, math, os, re, shutil, signal, socket, statistics, subprocess, sys, time, urllib.request
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np, pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
OUT = ROOT/'out'
ARGS = ('--no-sandbox --disable-gpu --disable-background-networking --disable-component-update '
        '--disable-sync --no-first-run --enable-unsafe-swiftshader').split() # the map needs WebGL, if only in software
BIG = dict(width=1500, height=1500) # pixels of a page
pytestmark = [pytest.mark.browser, pytest.mark.slow]
SETTINGS = {'@jupyterlab/apputils-extension:notification': {'fetchNews': 'false', 'checkForUpdates': False}, # no popup
            '@jupyterlab/notebook-extension:tracker': {'windowingMode': 'none'}} # cells out of sight stay on the page

def missing():
    "Why there can be no browser here; '' if there can."
    if find_spec('playwright') is None: return 'the package playwright is not installed: pip install playwright'
    return '' if chromium() else 'there is no Chromium: apt-get install chromium, or set CHROMIUM to its path'

def chromium():
    "The path of a browser, or None."
    names = 'chromium', 'chromium-browser', 'google-chrome'
    return os.environ.get('CHROMIUM') or next(filter(None, map(shutil.which, names)), None)

def free_port():
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); return s.getsockname()[1]

PATIENCE = float(os.environ.get('MULTIGRAIN_PATIENCE', 1)) # for a machine that does much else: all waiting times it

def until(f, what, seconds=90):
    "The first true value of f()."
    end = time.monotonic() + PATIENCE*seconds
    while time.monotonic() < end:
        if value := f(): return value
        time.sleep(.2)
    raise AssertionError(f'{what} did not happen in {seconds} s')

class Server:
    "A server of its own on copies of the explorers, and a browser."
    def __init__(self, home, browser):
        self.home, self.browser, self.port, self.token = home, browser, free_port(), os.urandom(16).hex()
        if not (home/'settings.ini').exists():
            no_copies = shutil.ignore_patterns('.ipynb_checkpoints')
            shutil.copytree(ROOT/'nbs'/'explore', home/'nbs'/'explore', ignore=no_copies)
            shutil.copy(ROOT/'settings.ini', home) # so that runs, data and out are those of this folder

    def start(self, *command, **env):
        own = dict(JUPYTER_CONFIG_DIR='config', JUPYTER_RUNTIME_DIR='runtime', IPYTHONDIR='ipython')
        env = os.environ | {k: str(self.home/v) for k, v in own.items()} | env
        env |= dict(OMP_NUM_THREADS='1', OMP_WAIT_POLICY='PASSIVE')
        self.log = self.home/f'{type(self).__name__}.log'
        self.server = subprocess.Popen(command, cwd=self.home, env=env, stdout=open(self.log, 'w'),
                                       stderr=subprocess.STDOUT, start_new_session=True)

    def close(self):
        os.killpg(self.server.pid, signal.SIGTERM)
        try: self.server.wait(20)
        except subprocess.TimeoutExpired: os.killpg(self.server.pid, signal.SIGKILL); self.server.wait()

class Lab(Server):
    "JupyterLab."
    def __init__(self, home, browser):
        super().__init__(home, browser)
        for name in ('settings', 'user', 'workspaces'): (home/name).mkdir(exist_ok=True)
        (home/'settings'/'overrides.json').write_text(json.dumps(SETTINGS))
        self.start(BIN/'jupyter', 'lab', '--no-browser', '--allow-root', '--ip=127.0.0.1', f'--port={self.port}',
                   '--ServerApp.port_retries=0', f'--IdentityProvider.token={self.token}',
                   '--LabApp.expose_app_in_browser=True',
                   f'--ServerApp.root_dir={home}', f'--LabApp.app_settings_dir={home/"settings"}',
                   f'--LabApp.user_settings_dir={home/"user"}', f'--LabApp.workspaces_dir={home/"workspaces"}',
                   JUPYTER_CONFIG_PATH=str(ROOT/'nbs'/'lab'), MULTIGRAIN_ROOT=str(home)) # as `make lab` does
        until(lambda: self.get('api/status'), 'JupyterLab', 60)

    def get(self, path):
        "JSON from the server, or None."
        url = f'http://127.0.0.1:{self.port}/{path}?token={self.token}'
        try: return json.load(urllib.request.urlopen(url, timeout=5))
        except OSError: return None

    def ready(self, name):
        "Has the notebook a kernel that is idle and connected? The toolbar says idle before there is one."
        return any(name in path and state == 'idle' and connections > 0 for path, state, connections in self.kernels())

    def kernels(self):
        "Path of the notebook, state and number of connections of every kernel."
        return [(o['path'], o['kernel']['execution_state'], o['kernel']['connections'])
                for o in self.get('api/sessions') or []]

    def open(self, name):
        "A page with all cells of nbs/explore/<name>.ipynb run."
        page = self.browser.new_page(viewport=BIG)
        page.set_default_timeout(PATIENCE*30_000)
        tree = f'lab/workspaces/{name}/tree' # a workspace of its own: no tab of another test
        page.goto(f'http://127.0.0.1:{self.port}/{tree}/nbs/explore/{name}.ipynb?token={self.token}')
        page.wait_for_selector('.jp-Notebook .jp-Cell', timeout=PATIENCE*60_000)
        until(lambda: self.ready(name), 'an idle and connected kernel')
        page.locator('.lm-MenuBar-itemLabel', has_text='Run').first.click()
        page.locator('.lm-Menu-itemLabel', has_text='Run All Cells').first.click()
        page.began = time.monotonic()
        def prompts(): return page.locator('.jp-CodeCell .jp-InputArea-prompt').all_inner_texts()
        def done(): return no_error(page) or all(re.fullmatch(r'\[\d+\]:', o.strip()) for o in prompts())
        try: until(done, 'the end of all cells', 240)
        except AssertionError as e:
            screenshot(page, f'{name}_failed')
            raise AssertionError(f'{e}; cells {prompts()}, kernels {self.kernels()}') from e
        return page # until then the kernel would answer late: it runs one thing at a time

class App(Server):
    "What `make app` serves."
    def __init__(self, home, browser):
        super().__init__(home, browser)
        make = ['make', '--no-print-directory', '-n', 'app', f'PORT={self.port}', f'ROOT={home}']
        recipe = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        lines = recipe.replace('\\\n', ' ').splitlines()
        voila = next(o for o in lines if ' voila nbs/explore' in o)
        self.start('sh', '-c', voila, PATH=f'{BIN}{os.pathsep}{os.environ["PATH"]}', JUPYTER_TOKEN=self.token)
        until(lambda: self.read(''), 'the app', 60)

    def read(self, path):
        url = f'http://127.0.0.1:{self.port}/{path}?token={self.token}'
        try: return urllib.request.urlopen(url, timeout=5).read().decode()
        except OSError: return None

    def open(self, name):
        page = self.browser.new_page(viewport=BIG)
        page.set_default_timeout(PATIENCE*30_000)
        url = f'http://127.0.0.1:{self.port}/voila/render/{name}.ipynb?token={self.token}'
        page.goto(url, timeout=PATIENCE*120_000)
        return page

@pytest.fixture(scope='module')
def browser():
    if reason := missing():
        if os.environ.get('CI_REQUIRE_BROWSER') == '1': pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium(), args=ARGS)
        try: yield browser
        finally: browser.close()

@pytest.fixture(scope='module')
def home(tmp_path_factory):
    "Both servers work in it: what the one has drawn and indexed, the other finds."
    return tmp_path_factory.mktemp('lab')

@pytest.fixture(scope='module')
def lab(home, browser):
    lab = Lab(home, browser)
    try: yield lab
    finally: lab.close()

@pytest.fixture(scope='module')
def app(home, browser):
    app = App(home, browser)
    try: yield app
    finally: app.close()

def digest(page, css):
    "A hash of the bytes of a picture on the page."
    return page.evaluate('''async css => {
        const bytes = await (await fetch(document.querySelector(css).src)).arrayBuffer();
        return [...new Uint8Array(bytes)].reduce((h, b) => (h*31 + b) >>> 0, bytes.byteLength) }''', css)

@contextmanager
def changes(page, css):
    "Inside, the picture becomes another one."
    before = digest(page, css)
    yield
    until(lambda: digest(page, css) != before, f'a new picture in {css}', 60)

def wait_text(page, css, *words, seconds=60):
    until(lambda: all(o in page.inner_text(css) for o in words), f'{words} in {css}', seconds)

def no_error(page):
    "No cell and no widget shows an error."
    bad = ', '.join(f'[data-mime-type="application/vnd.jupyter.{o}"]' for o in ('error', 'stderr'))
    assert page.locator(bad).all_inner_texts() == []
    assert 'Error displaying widget' not in page.inner_text('body')

def key_to_picture(page, handle, img, key, n=21):
    "Milliseconds from a key press to the new picture, for each of n presses."
    page.evaluate('''img => { window.mg = {}; const o = document.querySelector(img);
        document.addEventListener('keydown', () => window.mg.down = performance.now(), true);
        o.addEventListener('load', () => window.mg.load = performance.now()) }''', img)
    times = []
    for _ in range(n):
        page.evaluate('window.mg.load = null')
        page.locator(handle).press(key)
        page.wait_for_function('window.mg.load !== null', timeout=PATIENCE*10_000)
        times.append(page.evaluate('window.mg.load - window.mg.down'))
        page.wait_for_timeout(60) # one event at a time
    return times

def note(name, numbers):
    "Numbers for people, in out/browser.json."
    OUT.mkdir(exist_ok=True)
    file = OUT/'browser.json'
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | {name: numbers}, indent=1))

def record(name, times):
    "Milliseconds from key presses to pictures."
    note(name, dict(key_to_picture_ms=round(statistics.median(times)), slowest_ms=round(max(times)),
                    presses=len(times)))

def screenshot(page, name):
    (OUT/'screenshots').mkdir(parents=True, exist_ok=True)
    page.screenshot(path=OUT/'screenshots'/f'{name}.png')

def silent(page):
    "Is there nothing to say?"
    return page.inner_text('.mg-message').strip() == ''

def set_text(page, name, text):
    "Write into a control, and press Enter."
    field = page.locator(f'.mg-{name} input')
    field.fill(text); field.press('Enter')

def rows_of(page, *names):
    "In how many rows some controls stand."
    tops = sorted(page.locator(f'.mg-{o}').first.bounding_box()['y'] for o in names)
    return 1 + sum(b - a > 20 for a, b in zip(tops, tops[1:]))

def photograph(path, megabytes):
    "A JPEG file of at least so many megabytes: noise does not become small."
    noise = np.random.default_rng(0).integers(0, 256, (2000, 2600, 3), np.uint8)
    Image.fromarray(noise).save(path, quality=98, subsampling=0)
    assert path.stat().st_size > megabytes*1e6
    return path

def upload(page, file):
    with page.expect_file_chooser() as chooser: page.locator('.mg-upload').click()
    chooser.value.set_files(file)

def contrast(page, css):
    "Of a text with the page behind it; 1: invisible, 21: black on white."
    def light(colour):
        parts = [int(o)/255 for o in re.findall(r'\d+', colour)[:3]]
        parts = [o/12.92 if o <= .04045 else ((o + .055)/1.055)**2.4 for o in parts]
        return np.dot((.2126, .7152, .0722), parts)
    text, page_colour = page.evaluate("""css => [getComputedStyle(document.querySelector(css)).color,
        getComputedStyle(document.documentElement).getPropertyValue('--jp-layout-color0').trim()]""", css)
    if page_colour.startswith('#'): # three or six digits
        digits = page_colour[1:] if len(page_colour) == 7 else ''.join(2*o for o in page_colour[1:])
        page_colour = ' '.join(str(int(digits[i:i+2], 16)) for i in (0, 2, 4))
    elif not re.search(r'\d', page_colour): page_colour = dict(white='255 255 255', black='0 0 0')[page_colour]
    a, b = sorted([light(text), light(page_colour)])
    return (b + .05)/(a + .05)

@contextmanager
def dark_theme(page):
    "Inside, the page is dark."
    def choose(name):
        page.evaluate(f"window.jupyterapp.commands.execute('apputils:change-theme', {{theme: 'JupyterLab {name}'}})")
        light = str(name == 'Light').lower()
        until(lambda: page.get_attribute('body', 'data-jp-theme-light') == light, f'the theme {name}')
        page.wait_for_timeout(500)
    choose('Dark')
    try: yield
    finally: choose('Light')

MAP = 'img.mg-panel4' # the last panel: the contributions to a class

def first_screen(page, name, there, seconds):
    "How long the first screen takes, from Run All on a new kernel; it is kept in out/browser.json, too."
    until(there, f'the first screen of {name}', 240)
    took = time.monotonic() - page.began
    note(f'{name}_first_screen', dict(seconds=round(took, 1), at_most=seconds, patience=PATIENCE))
    assert took < 4*PATIENCE*seconds, f"the first screen of {name} took {took:.1f} s" # tests run beside each other

def test_heatmaps(lab, tmp_path):
    page = lab.open('heatmaps')
    first_screen(page, 'heatmaps', lambda: page.locator(MAP).count(), 5)
    wait_text(page, '.mg-numbers', 's* = 500', 'p* = 3', 'logit', 'passes of the trunk so far: 1')
    assert silent(page)
    photos = find_spec('skimage') is not None # then it is a cup of coffee
    name = page.locator('.mg-label input')
    assert name.input_value() == ('espresso' if photos else 'military uniform')
    assert page.locator('.mg-shape select').input_value() == 'rectangle' # as a whole
    assert 0 <= page.locator('.mg-view').bounding_box()['y'] < BIG['height']/2 # the reader sees it after Run all
    by = 'coffee.png: photograph by Rachel Michetti, CC0' if photos else 'photograph by the US Navy, public domain'
    assert by in page.inner_text('.mg-numbers')
    screenshot(page, 'heatmaps_first')

    handle = '.mg-p .noUi-handle'
    with changes(page, MAP): page.locator(handle).press('ArrowRight')
    wait_text(page, '.mg-numbers', 'p* = 3.05')
    times = key_to_picture(page, handle, MAP, 'ArrowRight', 11)
    wait_text(page, '.mg-numbers', f'p* = {3.05 + .05*len(times):.4g}', 'so far: 1') # every press, no pass
    record('heatmaps', times)
    assert statistics.median(times) < PATIENCE*500, times # some 60 ms on a quiet machine; tests run beside each other
    with changes(page, MAP): page.locator('.mg-opacity .noUi-handle').press('ArrowRight')

    page.locator('.mg-image select').select_option('grace_hopper.jpg')
    wait_text(page, '.mg-numbers', 'so far: 2')
    for text, taken in (('Windsor TIE', 'Windsor tie'), ('militry uniform', 'military uniform'),
                        ('906', 'Windsor tie'), ('652', 'military uniform')):
        set_text(page, 'label', text)
        wait_text(page, '.mg-numbers', f'{taken}: logit')
        assert name.input_value() == taken
    set_text(page, 'label', 'xyzzy')
    wait_text(page, '.mg-message', 'no class is called', 'xyzzy')
    until(lambda: name.input_value() == 'military uniform', 'the class of before')
    best = page.locator('.mg-best:visible').nth(1)
    words = best.inner_text().split('%')[1].strip()
    with changes(page, MAP): best.click()
    wait_text(page, '.mg-numbers', f'{words}: logit')
    assert name.input_value() == words and not page.locator('.mg-follow input').is_checked() and silent(page)
    page.locator('.mg-follow input').click()
    first = page.locator('.mg-best:visible').nth(0).inner_text().split('%')[1].strip()
    wait_text(page, '.mg-numbers', f'{first}: logit')

    box = page.locator('.mg-panel4').bounding_box()
    page.locator('.mg-zoom').nth(4).click()
    until(lambda: page.locator('.mg-panel4').bounding_box()['width'] > 2*box['width'], 'a large panel')
    page.locator('.mg-zoom').nth(4).click()
    until(lambda: page.locator('.mg-panel4').bounding_box()['width'] < 1.1*box['width'], 'a small panel again')

    page.locator('.mg-s .noUi-handle').press('PageDown')
    for _ in range(6): page.locator('.mg-s .noUi-handle').press('ArrowDown') # each supersedes the one before
    def last(): return f"s* = {page.inner_text('.mg-s .widget-readout').strip()},"
    until(lambda: silent(page) and last() in page.inner_text('.mg-numbers'), 'the last resolution')

    page.locator('.mg-more button, button.mg-more').first.click()
    with changes(page, 'img.mg-panel1'): page.locator('.mg-channel select').select_option(index=2)
    with changes(page, 'img.mg-panel1'): page.locator('.mg-against select').select_option('another p*')
    assert page.locator('.mg-p2').is_visible() and not page.locator('.mg-s2').is_visible()
    screenshot(page, 'heatmaps_compare')
    with changes(page, 'img.mg-panel1'): page.locator('.mg-against select').select_option('nothing')

    images = page.locator('.mg-image select')
    for size in (15, 0): # as a camera makes them; and a small one
        file = tmp_path/f'my picture {size}.jpg'
        if size: photograph(file, size)
        else: Image.fromarray(np.full((60, 80, 3), 90, np.uint8)).save(file)
        with changes(page, 'img.mg-panel0'): upload(page, file)
        until(lambda: (images.input_value() or '').endswith(file.name), 'the upload in the list')
        until(lambda: silent(page), 'its picture')
    chosen = images.input_value()
    set_text(page, 'path', '/not/there.jpg')
    wait_text(page, '.mg-message', '/not/there.jpg', 'neither a file nor')
    assert images.input_value() == chosen and '/not/there.jpg' not in images.inner_text()
    images.select_option('grace_hopper.jpg')
    until(lambda: silent(page) and page.locator('.mg-path input').input_value() == '', 'no message, no typo any more')

    page.context.grant_permissions(['clipboard-read', 'clipboard-write'])
    page.locator('.mg-code button').click()
    wait_text(page, '.mg-code button', 'copied')
    assert 'figure(Scene(' in page.evaluate('navigator.clipboard.readText()')
    for kind, start in (('png', b'\x89PNG'), ('pdf', b'%PDF')):
        with page.expect_download() as download: page.locator(f'.mg-{kind}').click()
        assert download.value.suggested_filename.endswith(kind)
        assert Path(download.value.path()).read_bytes().startswith(start)
    assert not list(lab.home.glob('out/heatmap*')) # nothing is written on the server
    page.locator('.mg-more button, button.mg-more').first.click()
    no_error(page)

    widths = {}
    page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')") # not its list of files
    for width in (900, 1600):
        page.set_viewport_size(dict(width=width, height=1200))
        until(lambda: page.locator('.mg-view').bounding_box()['width'] < width, 'a new layout')
        page.wait_for_timeout(500)
        some = 'image upload model label follow p inf s shape opacity more'.split()
        assert rows_of(page, *some) <= 2, width
        view, panels = page.locator('.mg-view').bounding_box(), page.locator('.mg-shot:visible')
        boxes = [panels.nth(i).bounding_box() for i in range(panels.count())]
        widths[width] = boxes[0]['width']
        assert max(o['x'] + o['width'] for o in boxes) > view['x'] + .95*view['width'] # they fill it
        screenshot(page, f'heatmaps_{width}')
    assert widths[1600] > 230

    with dark_theme(page):
        set_text(page, 'label', 'xyzzy')
        wait_text(page, '.mg-message', 'no class is called')
        for css in ('.mg-message .mg-said', '.mg-numbers .mg-small', '.mg-caption', '.mg-best'):
            assert contrast(page, css) > 4.5, css
        screenshot(page, 'heatmaps_dark')
    page.close()

def face(page, css):
    "What a picture that can be clicked shows: its words and a hash of its bytes."
    return page.evaluate("""async css => {
        const o = document.querySelector(css), url = getComputedStyle(o).backgroundImage.slice(5, -2);
        const bytes = new Uint8Array(await (await fetch(url)).arrayBuffer());
        return [o.innerText, bytes.reduce((h, b) => (h*31 + b) >>> 0, bytes.length)] }""", css)

def faces(page, group, n=6): return [face(page, f'.mg-{group}:nth-child({i + 1})') for i in range(n)]

def names(page, group):
    "Files of a row, as they are named below their pictures, and their numbers."
    words = [o.splitlines()[:2] for o in page.locator(f'.mg-{group}:visible').all_inner_texts()]
    return [o[0] for o in words], [o[1] for o in words]

def query_of(page): return page.locator('.mg-query input').input_value()

def quiet(page): return silent(page) and not page.locator('.mg-bar').is_visible()

def answer(page):
    "The number of the answer that is shown, 0 before the first."
    found = page.locator('.mg-numbers').count() and re.search(r'answer (\d+) took', page.inner_text('.mg-numbers'))
    return int(found[1]) if found else 0

def ask(page, act, what):
    "Do something to the search explorer, and wait for the next answer."
    before = answer(page)
    act()
    try: until(lambda: quiet(page) and answer(page) > before, what, 60)
    except AssertionError: screenshot(page, 'failed'); raise

def ask_with(page, name, text, what): ask(page, lambda: set_text(page, name, text), what)

def more(page): page.locator('button.mg-more').click()

@pytest.fixture(scope='module')
def mine(tmp_path_factory):
    "A folder of one's own: photographs of the public domain, their copies, and a file that is no image."
    from multigrain.datasets import open_picture, pictures
    from multigrain.photos import package_photos
    from multigrain.world import COPY, crop_copy, stream, strong_copy
    folder, free = tmp_path_factory.mktemp('photos'), [k for k, o in package_photos().items() if o.free]
    for i, name in enumerate([*free, *(o for o in pictures() if o.startswith('synthetic'))]):
        image = Image.fromarray(open_picture(name).permute(1, 2, 0).numpy())
        image.save(folder/f'{Path(name).stem}.jpg')
        if name.startswith('synthetic'): continue
        strong_copy(image, stream(0, COPY, i, 1)).save(folder/f'{Path(name).stem} edited.jpg')
        crop_copy(image, 50, stream(0, COPY, i, 2)).save(folder/f'{Path(name).stem} cut.jpg')
    (folder/'note.jpg').write_text('no image')
    return folder

def test_search_first_screen(lab):
    "Photographs, if there are some, without a click; what comes is seen at once."
    page = lab.open('search')
    first_screen(page, 'search', lambda: answer(page), 15)
    until(lambda: quiet(page), 'the first match', 60)
    assert 0 <= page.locator('.mg-view').bounding_box()['y'] < BIG['height']/2
    if find_spec('mvtbdata'):
        assert query_of(page) == 'building2-3.png' and 'palace' in page.inner_text('.mg-words')
        assert 'photograph by Peter Corke' in page.inner_text('.mg-words')
        assert {'building2-1', 'building2-2', 'building2-3_cut'} <= {*names(page, 'instance')[0]}
        assert 'building2-3_cut' in names(page, 'copy')[0]
    else: assert 'These pictures are synthetic' in page.inner_text('.mg-note')
    wait_text(page, '.mg-about_class', 'images of class', 'probability')
    wait_text(page, '.mg-numbers', 'copies are above')
    screenshot(page, 'search_first')
    no_error(page)
    page.close()

def test_search(lab, mine, tmp_path):
    page = lab.open('search')
    until(lambda: quiet(page) and answer(page), 'the first answers', 240)
    more(page)
    ask_with(page, 'path', str(mine), 'another folder')
    n = len(list(mine.iterdir())) - 1 # Lab is not confined
    wait_text(page, '.mg-numbers', f'{n} images', 'not whitened', '1 file left out')
    page.locator('.mg-numbers summary').click()
    wait_text(page, '.mg-numbers', 'note.jpg: is not an image') # which, and why

    ask_with(page, 'query', 'grace_hopper.jpg', 'answers to a name') # typed as it is shown
    first, numbers = faces(page, 'instance'), names(page, 'instance')[1]
    assert {*names(page, 'instance')[0][:2]} == {'grace_hopper edited', 'grace_hopper cut'} # names of files are seen
    assert len({picture for _, picture in first}) == 6
    similarities = [float(o[:5]) for o in numbers]
    assert similarities == sorted(similarities, reverse=True)
    threshold = float(re.search(r'similarity above (\d\.\d+)', page.inner_text('.mg-about_copy'))[1])
    assert all(float(o[:5]) > threshold for o in names(page, 'copy')[1])
    assert page.locator('.mg-instance.mg-above').count() == sum(o > threshold for o in similarities)
    sure = [float(re.search(r'-?[\d.]+', o)[0]) for o in names(page, 'class')[1]]
    assert sure == sorted(sure, reverse=True) # it says what it is sorted by

    handle = '.mg-p .noUi-handle' # by keyboard
    def passes(): return int(re.search(r'so far: (\d+)', page.inner_text('.mg-numbers'))[1])
    before = passes()
    with changes(page, 'img.mg-panel1'):
        ask(page, lambda: page.locator(handle).press('ArrowRight'), 'another exponent')
    wait_text(page, '.mg-numbers', 'p* = 4')
    assert [words for words, _ in faces(page, 'instance')] != [words for words, _ in first]
    ask(page, lambda: page.locator(handle).press('ArrowLeft'), 'the exponent of before')
    assert faces(page, 'instance') == first and passes() <= before + 2 # nobody looked at the folder again
    times = key_to_picture(page, handle, 'img.mg-panel1', 'ArrowRight', 5)
    record('search', times)
    for _ in times: page.locator(handle).press('ArrowLeft')
    def back(): return 'p* = 3,' in page.inner_text('.mg-numbers') and faces(page, 'instance') == first
    until(lambda: quiet(page) and back(), 'where we were')

    ask(page, lambda: page.locator('.mg-whiten input').press('Space'), 'whitening')
    wait_text(page, '.mg-numbers', ', whitened')
    assert faces(page, 'instance') != first
    ask(page, lambda: page.locator('.mg-whiten input').press('Space'), 'no whitening')
    ask(page, lambda: page.locator('.mg-fpr select').select_option('10 %'), 'another rate')
    wait_text(page, '.mg-about_copy', 'rate 0.1')
    ask(page, lambda: page.locator('.mg-shape select').select_option('rectangle'), 'whole images')
    wait_text(page, '.mg-numbers', '224 rectangle')
    ask(page, lambda: page.locator('.mg-k .noUi-handle').press('ArrowRight'), 'seven results')
    assert page.locator('.mg-instance:visible').count() == 7

    second = page.locator('.mg-instance').nth(1).get_attribute('title')
    with changes(page, 'img.mg-asked'):
        ask(page, lambda: page.locator('.mg-instance').nth(1).click(), 'a result as the query')
    assert query_of(page) == second
    page.locator('.mg-click select').select_option('compares it with the query')
    with changes(page, 'img.mg-panel1'): page.locator('.mg-instance').nth(3).click()
    assert query_of(page) == second
    page.locator('.mg-click select').select_option('asks with it')
    with changes(page, 'img.mg-panel1'): page.locator('.mg-opacity .noUi-handle').press('ArrowRight')

    mirrored = Image.open(mine/'grace_hopper.jpg').transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    mirrored.save(mine/'added.jpg') # somebody adds one
    (mine/'grace_hopper cut.jpg').unlink()
    ask_with(page, 'query', 'grace_hopper.jpg', 'the query of before')
    ask(page, lambda: page.locator('.mg-again').click(), 'a second look')
    assert names(page, 'instance')[0][0] == 'added' and 'grace_hopper cut' not in names(page, 'instance')[0]
    wait_text(page, '.mg-numbers', f'{n} images')

    file = tmp_path/'my fish.png' # a mirror image that is not in the folder
    Image.open(mine/'synthetic fish.jpg').transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(file)
    with changes(page, 'img.mg-asked'): ask(page, lambda: upload(page, file), 'answers to an upload')
    assert query_of(page).endswith('-my fish.png') and names(page, 'instance')[0][0].startswith('synthetic fish')
    bad = tmp_path/'text.png'; bad.write_text('no image')
    upload(page, bad)
    wait_text(page, '.mg-message', 'is not an image')
    set_text(page, 'path', '/not/there')
    wait_text(page, '.mg-message', '/not/there', 'not a folder')
    assert '/not/there' not in page.locator('.mg-folder select').inner_text()
    ask_with(page, 'query', 'grace_hopper.jpg', 'something that works')
    assert page.locator('.mg-path input').input_value() == ''
    no_error(page)

    more(page)
    page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')") # not its list of files
    page.set_viewport_size(dict(width=900, height=1200))
    page.wait_for_timeout(500)
    assert rows_of(page, *'folder again model s shape p whiten query upload more'.split()) <= 2
    screenshot(page, 'search_900')
    with dark_theme(page):
        set_text(page, 'query', '/not/there.jpg')
        wait_text(page, '.mg-message', '/not/there.jpg')
        texts = ('.mg-message .mg-said', '.mg-numbers .mg-small', '.mg-caption', '.mg-words .mg-said',
                 '.mg-about_copy .mg-said', '.mg-instance', '.mg-browse')
        for css in texts: assert contrast(page, css) > 4.5, css
        screenshot(page, 'search_dark')
    page.close()

def tab(page, name): page.locator('.mg-tabs .lm-TabBar-tab', has_text=name).click()

def point_at(page, canvas):
    "Move the pointer over the map until an image answers; where it was lately, the last first."
    box, places = canvas.bounding_box(), []
    for i in range(20, 400, 4): # along a spiral
        angle, r = i/9, i/400*min(box['width'], box['height'])/2
        x, y = box['x'] + box['width']/2 + r*math.cos(angle), box['y'] + box['height']/2 + r*math.sin(angle)
        places.append((x, y))
        page.mouse.move(x, y)
        page.wait_for_timeout(60)
        if page.inner_text('.mg-hovered').strip(): return places[::-1][:20]
    raise AssertionError('no image under the pointer')

def click_map(page, places):
    "Click where the pointer was, until an image is asked with: a busy kernel answers late."
    before = query_of(page)
    for x, y in places:
        page.mouse.move(x, y)
        page.wait_for_timeout(300)
        page.mouse.click(x, y)
        page.wait_for_timeout(PATIENCE*700)
        if query_of(page) != before: return
    raise AssertionError('no image was hit')

def live_map(page):
    "The canvas of the map, once it is there; None without the package."
    tab(page, 'map')
    until(lambda: page.inner_text('.mg-about_map').strip() and quiet(page), 'a map')
    if find_spec('jscatter') is None:
        assert page.locator('.mg-picture').is_visible() and 'jupyter-scatter' in page.inner_text('.mg-about_map')
        return
    canvas = page.locator('.mg-tabs canvas').first
    canvas.wait_for(state='visible')
    return canvas

def test_search_folder(lab, mine):
    "All copies of the folder, and the map of it: both feed the three rows."
    page = lab.open('search')
    until(lambda: quiet(page) and answer(page), 'the first answers', 240)
    more(page)
    ask_with(page, 'path', str(mine), 'another folder')
    more(page)
    tab(page, 'copies')
    wait_text(page, '.mg-about_groups', 'expected by chance', 'Nothing is deleted')
    def found(): return int(re.search(r'(\d+) groups? of', page.inner_text('.mg-about_groups'))[1])
    few = found()
    page.locator('.mg-rate .noUi-handle').press('End')
    until(lambda: found() > few, 'more groups') # for more false pairs
    until(lambda: page.locator('.mg-group0:visible').count() > 1, 'the images of a group')
    assert 'keep' in page.locator('.mg-group0').first.inner_text()
    screenshot(page, 'search_copies')
    second = page.locator('.mg-group0').nth(1).get_attribute('title')
    ask(page, lambda: page.locator('.mg-group0').nth(1).click(), 'an image of a group as the query')
    assert query_of(page) == second

    if (canvas := live_map(page)) is None: return page.close()
    places = point_at(page, canvas)
    assert page.locator('.mg-hover').is_visible() # its picture
    ask(page, lambda: click_map(page, places), 'an image of the map as the query')
    assert (mine/query_of(page)).exists()
    box = canvas.bounding_box()
    def lasso():
        left, top = box['x'] + 180, box['y'] + 5
        right, bottom = box['x'] + box['width'] - 5, box['y'] + box['height'] - 5
        page.locator('.mg-place button').nth(1).click() # beside the one that moves the map
        page.mouse.move(left, top); page.mouse.down()
        corners = (right, top), (right, bottom), (left, bottom), (left, top + 5)
        for o in corners: page.mouse.move(*o, steps=12)
        page.mouse.up()
    ask(page, lasso, 'answers to a lasso')
    wait_text(page, '.mg-picked', 'images selected')
    screenshot(page, 'search_map')
    no_error(page)
    page.close()

def test_app(app, mine, tmp_path):
    listing = app.read('')
    assert 'heatmaps.ipynb' in listing and 'search.ipynb' in listing # to choose from
    page = app.browser.new_page(viewport=BIG)
    page.goto(f'http://127.0.0.1:{app.port}/?token={app.token}')
    screenshot(page, 'app_first')
    page.close()
    shutil.copytree(mine, app.home/'photos')
    page = app.open('search')
    until(lambda: answer(page) and quiet(page), 'answers in the app', 240)
    more(page)
    set_text(page, 'path', str(mine)) # not in the folder that is open
    wait_text(page, '.mg-message', 'is not a folder')
    ask_with(page, 'path', str(app.home/'photos'), 'a folder in the app')
    with changes(page, 'img.mg-asked'):
        ask(page, lambda: page.locator('.mg-browse').nth(7).click(), 'a click in the app')
    screenshot(page, 'app_search')
    ask(page, lambda: page.locator('.mg-p .noUi-handle').press('ArrowRight'), 'another exponent in the app')
    wait_text(page, '.mg-numbers', 'p* = 4')
    if canvas := live_map(page): point_at(page, canvas)
    screenshot(page, 'app_map')
    assert page.locator('.jp-CodeMirrorEditor, .cm-editor, .jp-InputArea-editor').count() == 0 # no code
    no_error(page)
    page.close()

    page = app.open('heatmaps')
    def there(): return page.locator('.mg-numbers').count() and 'p* = 3' in page.inner_text('.mg-numbers')
    until(there, 'a heatmap in the app', 120)
    with changes(page, MAP): page.locator('.mg-p .noUi-handle').press('ArrowRight')
    wait_text(page, '.mg-numbers', 'p* = 3.05')
    assert silent(page)
    screenshot(page, 'app_heatmaps')
    with changes(page, 'img.mg-panel0'): upload(page, photograph(tmp_path/'large.jpg', 15))
    until(lambda: silent(page), 'the picture of a large upload')
    with page.expect_download() as download: page.locator('.mg-png').click()
    assert Path(download.value.path()).read_bytes().startswith(b'\x89PNG')
    assert str(app.home) not in page.content() # no path of the server
    no_error(page)
    page.close()
