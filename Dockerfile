# Two images: `preprocess` decodes and tiles images and never installs torch, `full` serves. Packages come before
# sources, so that an edited source installs none again; compilers and headers stay in the stages that build.

FROM python:3.11-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends \
        gcc g++ libc6-dev libjpeg-dev zlib1g-dev libwebp-dev libtiff-dev libfreetype-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /app
RUN python -m venv /venv
ENV PATH=/venv/bin:$PATH
# For every x86-64-v2 CPU; `--build-arg CC="cc -mavx2"` resizes about a tenth faster and needs AVX2.
ARG CC=cc
RUN pip install --no-cache-dir "setuptools>=77" wheel \
    && pip install --no-cache-dir --no-deps --no-binary pillow-simd pillow-simd==12.1.1.post0
COPY packaging/ packaging/
RUN pip install --no-cache-dir --no-deps ./packaging/pillow-shim \
    && python packaging/pillow_for_tiff.py --no-cache-dir
COPY pyproject.toml constraints.txt ./

FROM build AS preprocess-packages
RUN python packaging/requirements.py preprocess > packages.txt \
    && pip install --no-cache-dir -c constraints.txt -r packages.txt

FROM build AS full-packages
# An index of CPU-only builds saves gigabytes where no GPU is used; README, "Start".
ARG VLM_TORCH_INDEX=
RUN test -z "$VLM_TORCH_INDEX" \
    || pip install --no-cache-dir --no-deps -c constraints.txt --index-url "$VLM_TORCH_INDEX" torch torchvision
RUN python packaging/requirements.py full > packages.txt \
    && pip install --no-cache-dir -c constraints.txt -r packages.txt

FROM build AS native
COPY llm/backend/native*.cpp llm/backend/native*.h llm/backend/native_build.py native/
RUN python native/native_build.py

FROM build AS wheel
COPY --from=native /app/native/compiled/ llm/backend/compiled/
COPY README.md LICENSE NOTICE ./
COPY preprocess/ preprocess/
COPY encoder/ encoder/
COPY llm/ llm/
COPY workers/ workers/
COPY vlm/ vlm/
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheel .

FROM python:3.11-slim-bookworm AS runtime
RUN apt-get update && apt-get install -y --no-install-recommends \
        libjpeg62-turbo zlib1g libwebp7 libwebpdemux2 libwebpmux3 libtiff6 libfreetype6 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 vlm
WORKDIR /home/vlm
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

FROM runtime AS preprocess
COPY --from=preprocess-packages /venv/ /venv/
COPY --from=wheel /wheel/ /wheel/
RUN pip install --no-cache-dir --no-deps /wheel/*.whl && python -c "from PIL import _imaging, _imagingft, _webp"
USER 10001
ENTRYPOINT ["vlm", "worker", "preprocess"]

FROM runtime AS full
# Fonts of Latin, Greek, Cyrillic and CJK letters, for PDFs that embed none.
RUN apt-get update && apt-get install -y --no-install-recommends fonts-dejavu-core fonts-wqy-microhei \
    && rm -rf /var/lib/apt/lists/*
COPY --from=full-packages /venv/ /venv/
COPY --from=wheel /wheel/ /wheel/
RUN pip install --no-cache-dir --no-deps /wheel/*.whl && python -c "from PIL import _imaging, _imagingft, _webp"
USER 10001
EXPOSE 8000
ENTRYPOINT ["vlm"]
CMD ["serve", "--host", "0.0.0.0"]
