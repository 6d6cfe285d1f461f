# The commands on a CPU: docker run --rm -v "$PWD:/work" IMAGE compress MODEL -o out
FROM python:3.12-slim
# The image sees no git: --build-arg VERSION=1.2.3 says what it is.
ARG VERSION
COPY . /src
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu \
    && SETUPTOOLS_SCM_PRETEND_VERSION=${VERSION#v} pip install --no-cache-dir "/src[fast,gguf,report]" \
    && rm -rf /src \
    && useradd --create-home --uid 1000 user \
    && mkdir /work \
    && chown user /work
USER 1000
WORKDIR /work
ENTRYPOINT ["openquant"]
