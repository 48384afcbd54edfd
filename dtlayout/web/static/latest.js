// Latest: of questions that come faster than answers the last one alone is shown, and one is asked at a time.
export class Latest {
  constructor(ask, {began, done, failed}) {
    Object.assign(this, {ask, began, done, failed, running: false, next: null});
  }

  put(question) {
    this.next = question;
    if (!this.running) this.run();
  }

  async run() {
    this.running = true;
    while (this.next) {
      const question = this.next;
      this.next = null;
      this.began?.(question);
      try {
        const document = await this.ask(question);
        if (!this.next) this.done(document, question);
      } catch (error) {
        if (!this.next) this.failed(error);
      }
    }
    this.running = false;
  }
}
