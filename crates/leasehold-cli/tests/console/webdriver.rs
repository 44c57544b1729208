//! A headless Chromium, driven through `chromedriver`.
//!
//! `WebDriver` is JSON over HTTP, and the tests need a dozen of its commands. The crates that
//! implement all of it have some thirty dependencies.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{TIME_LIMIT, until};

const FLAGS: [&str; 10] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
];
/// The name under which `WebDriver` returns an element.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// A browser with one page. It is closed when dropped.
pub(crate) struct Browser {
    driver: Child,
    port: u16,
    session: String,
    _profile: TempDir,
}

impl Browser {
    pub(crate) fn start() -> Self {
        let command = Command::new("chromedriver").arg("--port=0").stdout(Stdio::piped()).spawn();
        let mut driver = command.expect("chromedriver is installed: scripts/test does it");
        let mut lines = BufReader::new(driver.stdout.take().unwrap()).lines();
        let port = lines.find_map(|line| {
            let line = line.ok()?;
            line.split_once("successfully on port ")?.1.trim_end_matches('.').parse().ok()
        });
        // Drains the output: a full pipe that nobody reads would block the driver.
        std::thread::spawn(move || lines.for_each(drop));
        let profile = tempfile::tempdir().unwrap();
        let mut flags: Vec<_> = FLAGS.iter().map(|flag| (*flag).to_owned()).collect();
        flags.push(format!("--user-data-dir={}", profile.path().display()));
        let port = port.expect("a port");
        let mut browser = Self { driver, port, session: String::new(), _profile: profile };
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "goog:chromeOptions": { "args": flags },
            "goog:loggingPrefs": { "browser": "ALL" },
        }}});
        let made = browser.send("POST", "/session", &wanted).unwrap();
        made["sessionId"].as_str().unwrap().clone_into(&mut browser.session);
        browser
    }

    /// Sends one command. The error is the one that `WebDriver` names.
    fn send(&self, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        let body = if method == "POST" { body.to_string() } else { String::new() };
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).map_err(|e| e.to_string())?;
        stream.set_read_timeout(Some(TIME_LIMIT)).unwrap();
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
        // Not to the end of the connection: the browser inherits it and keeps it open.
        let (mut reply, mut length) = (BufReader::new(stream), 0);
        loop {
            let mut line = String::new();
            reply.read_line(&mut line).map_err(|error| error.to_string())?;
            match line.trim_end().split_once(':') {
                Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                    length = value.trim().parse().map_err(|_| line.clone())?;
                }
                None if line.trim_end().is_empty() => break,
                _ => {}
            }
        }
        let mut body = vec![0; length];
        reply.read_exact(&mut body).map_err(|error| error.to_string())?;
        let mut value: Value = serde_json::from_slice(&body).map_err(|error| error.to_string())?;
        let value = value["value"].take();
        match value["error"].as_str() {
            Some(error) => Err(format!("{error}: {}", value["message"])),
            None => Ok(value),
        }
    }

    fn post(&self, path: &str, body: &Value) -> Result<Value, String> {
        self.send("POST", &format!("/session/{}{path}", self.session), body)
    }

    pub(crate) fn go(&self, url: &str) {
        self.post("/url", &json!({ "url": url })).unwrap();
    }

    /// Runs a script, and returns its value.
    pub(crate) fn run(&self, script: &str) -> Value {
        self.post("/execute/sync", &json!({ "script": script, "args": [] })).unwrap()
    }

    /// Returns the text of the page as people see it.
    pub(crate) fn text(&self) -> String {
        self.run("return document.body.innerText").as_str().unwrap_or_default().to_owned()
    }

    #[track_caller]
    pub(crate) fn shows(&self, text: &str) {
        until(|| self.text().contains(text));
    }

    #[track_caller]
    pub(crate) fn shows_no_more(&self, text: &str) {
        until(|| !self.text().contains(text));
    }

    pub(crate) fn has(&self, selector: &str) -> bool {
        self.element(selector).is_ok()
    }

    fn element(&self, selector: &str) -> Result<String, String> {
        let wanted = json!({ "using": "css selector", "value": selector });
        let element = self.post("/element", &wanted)?;
        Ok(element[ELEMENT].as_str().unwrap_or_default().to_owned())
    }

    /// Retries until the element exists and can be clicked.
    #[track_caller]
    pub(crate) fn click(&self, selector: &str) {
        until(|| {
            let element = self.element(selector);
            element.is_ok_and(|id| self.post(&format!("/element/{id}/click"), &json!({})).is_ok())
        });
    }

    pub(crate) fn type_into(&self, selector: &str, text: &str) {
        let element = self.element(selector).unwrap();
        self.post(&format!("/element/{element}/clear"), &json!({})).unwrap();
        self.post(&format!("/element/{element}/value"), &json!({ "text": text })).unwrap();
    }

    /// Presses a key.
    pub(crate) fn press(&self, key: &str) {
        let strokes =
            json!([{ "type": "keyDown", "value": key }, { "type": "keyUp", "value": key }]);
        let keyboard = json!([{ "type": "key", "id": "keyboard", "actions": strokes }]);
        self.post("/actions", &json!({ "actions": keyboard })).unwrap();
    }

    /// Returns whether a script of the page has opened an alert.
    pub(crate) fn has_alert(&self) -> bool {
        let path = format!("/session/{}/alert/text", self.session);
        self.send("GET", &path, &Value::Null).is_ok()
    }

    /// Returns the errors and warnings that the browser has logged since the last call.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let log = self.post("/se/log", &json!({ "type": "browser" })).unwrap();
        let lines = log.as_array().into_iter().flatten();
        lines.filter_map(|line| line["message"].as_str().map(str::to_owned)).collect()
    }

    /// Sends a command of the `DevTools` protocol.
    pub(crate) fn devtools(&self, command: &str, parameters: &Value) -> Value {
        self.post("/goog/cdp/execute", &json!({ "cmd": command, "params": parameters })).unwrap()
    }

    /// Returns a picture of what the window shows.
    pub(crate) fn screenshot(&self) -> Vec<u8> {
        let asked = json!({ "format": "png", "captureBeyondViewport": false });
        let taken = self.devtools("Page.captureScreenshot", &asked);
        BASE64_STANDARD.decode(taken["data"].as_str().unwrap()).unwrap()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let path = format!("/session/{}", self.session);
        let _ = self.send("DELETE", &path, &Value::Null);
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}
