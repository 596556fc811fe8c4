"""Broken files by the thousand: every cut and seeded flips of small images and archives, and what must be true of each.

python tests/fuzz.py [image|archive] [--minutes 60] [--seed 0]      seeded changes of the samples, for a while
python tests/fuzz.py [image|archive] --atheris [--minutes 60]       guided by coverage, where atheris is installed
A file that breaks a promise is kept in out/fuzz and named."""
import argparse, io, shutil, sys, tarfile, tempfile, time, warnings, zipfile
from pathlib import Path
import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 2 # that any small file may take, in processor time
MOST = 20_000_000 # pixels: a few hundred bytes may announce more, and a large picture takes its time

# samples

def draw(h=12, w=16, seed=0):
    "A synthetic picture: smooth noise."
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((w, h), Image.Resampling.BICUBIC)

def encoded(im, kind='JPEG', **how):
    im.save(b := io.BytesIO(), kind, **how)
    return b.getvalue()

def images()->dict: # name -> bytes
    "Small files of every format that is read, some animated, turned, transparent or of 16 bits."
    turned = Image.Exif(); turned[0x112] = 6
    two = dict(save_all=True, append_images=[draw(seed=1)])
    clear = Image.merge('RGBA', [*draw().split(), draw(seed=2).convert('L')])
    deep = Image.fromarray(np.random.default_rng(3).integers(0, 65536, (12, 16), dtype=np.uint16))
    return dict(jpeg=encoded(draw(), exif=turned), progressive=encoded(draw(), progressive=True),
                gif=encoded(draw(), 'GIF'), moving=encoded(draw(), 'GIF', **two),
                webp=encoded(draw(), 'WEBP', exif=turned), moving_webp=encoded(draw(), 'WEBP', **two),
                lossless=encoded(clear, 'WEBP', lossless=True),
                png=encoded(clear, 'PNG', exif=turned), apng=encoded(draw(), 'PNG', **two), deep=encoded(deep, 'PNG'),
                tiff=encoded(draw(), 'TIFF'), packed=encoded(draw(), 'TIFF', compression='tiff_lzw', exif=turned),
                avif=encoded(draw(), 'AVIF'), bmp=encoded(draw(), 'BMP'), ppm=encoded(draw(), 'PPM'),
                cmyk=encoded(draw().convert('CMYK')), jp2=encoded(draw(), 'JPEG2000'))

def archives()->dict: # name -> bytes
    "Small archives of every kind that is read."
    found = {}
    for how in ('w', 'w:gz', 'w:bz2', 'w:xz'):
        with tarfile.open(fileobj=(b := io.BytesIO()), mode=how) as t:
            for i in range(3):
                info = tarfile.TarInfo(f'jpg/{i}'); info.size = 40
                t.addfile(info, io.BytesIO(bytes([i])*40))
        found[how] = b.getvalue()
    for how in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(b := io.BytesIO(), 'w', how) as z:
            for i in range(3): z.writestr(f'jpg/{i}', bytes([i])*40)
        found[f'zip {how}'] = b.getvalue()
    return found

# damage

def cuts(data:bytes):
    "The file cut at every position."
    return (data[:n] for n in range(len(data)))

def damaged(data:bytes, rng)->bytes:
    "The file with a few bytes flipped, set, zeroed, repeated, moved or left out."
    data = bytearray(data)
    for _ in range(rng.integers(1, 5)):
        at, n = int(rng.integers(len(data) or 1)), int(rng.integers(1, 9))
        what = rng.integers(7)
        if what == 0 and data: data[at % len(data)] ^= 1 << int(rng.integers(8))
        if what == 1: data[at:at+n] = rng.bytes(n)
        if what == 2: data[at:at+n] = bytes([0, 255][n % 2] for _ in data[at:at+n])
        if what == 3: data[at:at] = data[at:at+n]*int(rng.integers(1, 40))
        if what == 4: del data[at:at+n]
        if what == 5: data[at:at+4] = int(rng.choice([0, 1, 255, 65535, 2**31 - 1, 2**32 - 1])).to_bytes(4, 'big')
        if what == 6: data[at:] = bytes(len(data) - at)
    return bytes(data)

# promises

class Broken(AssertionError):
    "A promise that was not kept, and by which file."

def check_image(data:bytes, path:Path)->str: # 'read' or why not
    "An image of the size that was announced, or one sentence with its name; in time either way."
    from multigrain.image import BadImage, load_image, read_header
    path.write_bytes(data)
    begun = time.process_time()
    try:
        header, pixels = read_header(path), load_image(path, min_side=1, max_pixels=MOST)
        if sorted(pixels.shape[1:]) != sorted(header[1:3]): raise Broken(f'{tuple(pixels.shape)} is not {header}')
        said = 'read'
    except BadImage as e:
        said = e.reason
        if not str(e).startswith(f'{path} ') or '\n' in str(e): raise Broken(f'not a sentence: {e}') from e
    except Broken: raise
    except Exception as e: raise Broken(f'{type(e).__name__}: {e}') from e
    if time.process_time() - begun > SECONDS: raise Broken(f'{time.process_time() - begun:.1f} s')
    return said

def check_archive(data:bytes, path:Path)->str: # 'read' or why not
    "Extracted into its folder and nowhere else, or one sentence that names the archive."
    from multigrain.download import extract
    path.write_bytes(data)
    goal = path.parent/'goal'
    begun = time.process_time()
    try: extract(path, goal); said = 'read'
    except ValueError as e:
        said = str(e)
        if not said.startswith('archive=') or '\n' in said: raise Broken(f'not a sentence: {e}') from e
    except Exception as e: raise Broken(f'{type(e).__name__}: {e}') from e
    finally: shutil.rmtree(goal, ignore_errors=True)
    if {o.name for o in path.parent.iterdir()} - {path.name}: raise Broken('it wrote outside of its folder')
    if time.process_time() - begun > SECONDS: raise Broken(f'{time.process_time() - begun:.1f} s')
    return said

KINDS = dict(image=(images, check_image), archive=(archives, check_archive))

# campaigns

def keep(data:bytes, kind:str, why)->None:
    "Put a file that breaks a promise aside."
    folder = ROOT/'out'/'fuzz'
    folder.mkdir(parents=True, exist_ok=True)
    file = folder/f'{kind}-{abs(hash(data)):x}'
    file.write_bytes(data)
    print(f'{file}: {why}', file=sys.stderr, flush=True)

def seeded(kind:str, minutes:float, seed:int)->int: # broken promises
    "Changed samples until the time is over."
    (samples, check), rng = KINDS[kind], np.random.default_rng(seed)
    end, broken, n = time.monotonic() + 60*minutes, 0, 0
    some = list(samples().values())
    with tempfile.TemporaryDirectory() as d:
        while time.monotonic() < end:
            data, n = damaged(some[rng.integers(len(some))], rng), n + 1
            try: check(data, Path(d)/'x.jpg')
            except Broken as e: keep(data, kind, e); broken += 1
    print(f'{kind}: {n} files from seed {seed} in {minutes:g} minutes, {broken} broke a promise')
    return broken

def guided(kind:str, minutes:float)->None:
    "The same with atheris: changes that reach new code are built upon. Ends the process."
    import atheris
    with atheris.instrument_imports(include=['multigrain.image', 'multigrain.download', 'PIL', 'tarfile', 'zipfile']):
        import multigrain.download, multigrain.image  # noqa: F401
    samples, check = KINDS[kind]
    place = Path(tempfile.mkdtemp())
    (corpus := place/'corpus').mkdir(); (work := place/'work').mkdir()
    for name, data in samples().items(): (corpus/name.replace(' ', '').replace(':', '')).write_bytes(data)
    out = ROOT/'out'/'fuzz'
    out.mkdir(parents=True, exist_ok=True)
    def one(data): check(data, work/'x.jpg')
    words = [sys.argv[0], str(corpus), f'-max_total_time={int(60*minutes)}', '-max_len=4000', '-timeout=10',
             f'-artifact_prefix={out}/{kind}-', '-print_final_stats=1', '-rss_limit_mb=4000']
    atheris.Setup(words, one)
    atheris.Fuzz()

if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('kind', nargs='*', choices=[*KINDS, []])
    parser.add_argument('--minutes', type=float, default=60.)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--atheris', action='store_true')
    given = parser.parse_args()
    warnings.simplefilter('ignore') # of Pillow, about broken files
    sys.path.insert(0, str(ROOT))
    if given.atheris: guided((given.kind or ['image'])[0], given.minutes)
    else: sys.exit(any([seeded(o, given.minutes, given.seed) for o in given.kind or KINDS]))
