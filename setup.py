"Everything is read from settings.ini; nbdev's stock setup.py does not know recent Python versions."
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=['='])
ini.read(here/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']

def lines(key): return [o for o in cfg.get(key, '').splitlines() if o.strip()]

names = 'dev', 'lite0', 'photos', 'networks', 'timm', 'bench', 'map', 'parquet', 'milvus', 'runtime', 'docs'
extras = {o: lines(f'{o}_requirements') for o in names}

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'],
    long_description=(here/'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    author=cfg['author'], keywords=cfg['keywords'], license='Apache-2.0', license_files=['LICENSE'],
    packages=find_packages(include=['multigrain', 'multigrain.*']),
    package_data={'multigrain': ['py.typed', 'photos.json']},
    python_requires=f">={cfg['min_python']}",
    install_requires=lines('requirements'), extras_require=extras,
    classifiers=['Development Status :: 3 - Alpha', 'Intended Audience :: Science/Research',
                 'Natural Language :: English', 'Programming Language :: Python :: 3.11'],
)
