"""A page in headless Chromium, for tests that click and look."""

import base64
import json
import os
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium")


class Browser:
    """Headless Chromium, driven through its pipe of null-terminated JSON."""

    def __init__(self, folder):
        to_read, self.to = os.pipe()
        self.back, to_write = os.pipe()
        command = f"exec {CHROMIUM} --headless --no-sandbox --disable-gpu "
        command += f"--remote-debugging-pipe --user-data-dir={folder} 3<&{to_read} 4>&{to_write}"
        self.process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self.count, self.session, self.answers = 0, None, os.fdopen(self.back, "rb")

    def call(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            text = b""
            while (byte := self.answers.read(1)) != b"\0":
                assert byte, "the browser ended"
                text += byte
            found = json.loads(text)
            if found.get("id") == self.count:
                assert "result" in found, found
                return found["result"]

    def open(self, url):
        target = self.call("Target.createTarget", url=url)["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]

    def value(self, expression):
        return self.call("Runtime.evaluate", expression=expression)["result"].get("value")

    def wait(self, expression, seconds=60):
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, self.value("document.body.innerText")
            time.sleep(0.1)

    def choose(self, selector, file):
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def picture(self, file):
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        self.process.kill()
        self.process.wait()
        self.answers.close()
        os.close(self.to)
