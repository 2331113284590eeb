# The trainer; and compose's one-shot and the demo's agent, which need the extras "gateway" and "cli" as well.
FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /venv
COPY pyproject.toml deploy/docker/requirements.py ./
# Empty takes torch from wherever pip is configured to look: a mirror, or the CUDA build of the public index.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /venv/bin/pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
        "$(python requirements.py trainer --only torch)"
RUN python requirements.py trainer gateway cli --without torch > requirements.txt \
    && /venv/bin/pip install -r requirements.txt
COPY . .
RUN /venv/bin/pip install --no-deps .

FROM python:3.11-slim-bookworm
# A new named volume takes over the owner of the directory that it covers: these belong to the service.
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin weir \
    && install -d -o 10001 -g 10001 /model /etc/weir /var/lib/weir/policies /var/lib/weir/checkpoints
COPY --from=build /venv /venv
COPY deploy/docker/prepare.py /opt/weir/prepare.py
ENV PATH=/venv/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 HOME=/tmp WEIR_TRAINER__HOST=0.0.0.0
USER 10001
EXPOSE 8200
CMD ["python", "-m", "trainer_service"]
