# Two targets: `preprocess` decodes and tiles images and never installs torch; `full` serves.
FROM python:3.11-slim-bookworm AS base
RUN apt-get update && apt-get install -y --no-install-recommends \
        gcc g++ libc6-dev libjpeg-dev zlib1g-dev libwebp-dev libtiff-dev libfreetype-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /app
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
RUN pip install --no-cache-dir "setuptools>=77" wheel \
    && CC="cc -mavx2" pip install --no-cache-dir --no-deps --no-binary pillow-simd pillow-simd==12.1.1.post0
COPY packaging/ packaging/
RUN pip install --no-cache-dir --no-deps ./packaging/pillow-shim
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY preprocess/ preprocess/
COPY workers/ workers/
COPY llm/ llm/
COPY encoder/ encoder/
COPY vlm/ vlm/

FROM base AS preprocess
RUN pip install --no-cache-dir -c constraints.txt numpy celery redis packaging pypdfium2 psutil typer \
    && pip install --no-cache-dir --no-deps --no-build-isolation .
RUN useradd --create-home vlm
USER vlm
ENTRYPOINT ["vlm", "worker", "preprocess"]

FROM base AS full
# `vlm caption` draws PDFs: fonts for text whose own fonts are not embedded, Chinese, Japanese and Korean included
RUN apt-get update && apt-get install -y --no-install-recommends fonts-dejavu-core fonts-wqy-microhei \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir -c constraints.txt .
RUN useradd --create-home vlm
USER vlm
EXPOSE 8000
ENTRYPOINT ["vlm"]
CMD ["serve", "--host", "0.0.0.0"]
