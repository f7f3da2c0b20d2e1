/* Search runs in a worker, and a page that is opened from disk may not start one. There, its script runs in a hidden frame
   that is sent the same messages. The theme would otherwise load such a stand-in from the network. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inner = frame.contentWindow
      const answer = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const load = source => new Promise((resolve, reject) => {
        const script = this.inner.document.createElement("script")
        Object.assign(script, { src: new URL(source, location.href).href, onload: resolve, onerror: reject })
        this.inner.document.head.appendChild(script)
      })
      this.inner.postMessage = data => setTimeout(() => answer(data))
      this.inner.importScripts = (...urls) => urls.reduce((done, source) => done.then(() => load(source)), Promise.resolve())
      this.ready = load(url)
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.inner.frameElement.remove()
    }
  }
}
