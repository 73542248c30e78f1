# docker build -t grpo .                              for a CPU
# docker build -t grpo --build-arg SETUP_FOR=gpu .    for NVIDIA GPUs: their driver is the host's
# docker run --rm -it --gpus all --shm-size 16g -v ~/.cache/huggingface:/root/.cache/huggingface grpo
FROM python:3.11
ARG SETUP_FOR=cpu
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /grpo
COPY . .
RUN bash scripts/setup.sh && rm -rf ~/.cache/pip
CMD ["bash", "--init-file", "scripts/setup.sh"]
