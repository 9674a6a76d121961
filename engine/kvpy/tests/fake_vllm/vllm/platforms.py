"""The device that vLLM runs on."""


class Platform:
    device_type = "cuda"

    def get_device_name(self) -> str:
        return "a device"

    def is_cpu(self) -> bool:
        return False


current_platform = Platform()
