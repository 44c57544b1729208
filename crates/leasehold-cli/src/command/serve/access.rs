//! Access control: reading, acting, and requests that are refused.
//!
//! - A request names its host. Only requests for names of this server are answered, so that another site cannot reach
//!   it through a name that resolves to this address (DNS rebinding).
//! - Actions need the token: as `Authorization: Bearer`, or in a session that was started with it. A session is a
//!   cookie that scripts cannot read and that other sites cannot send (`SameSite=Strict`). Each POST must also come
//!   from this origin.
//! - The token is never part of a URL, because browsers and proxies store URLs.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::Read;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::Semaphore;

use super::console::Console;
use super::reply::{self, Refusal};
use crate::failure::Failure;

const SHORTEST_TOKEN: usize = 16;
const LONGEST_TOKEN: u64 = 4096;
/// How long a login lasts.
const SESSION: Duration = Duration::from_secs(12 * 3600);
/// The largest number of sessions. The oldest ends first.
const MOST_SESSIONS: usize = 256;
/// The delay of the answer to a wrong token.
const DELAY: Duration = Duration::from_secs(1);
/// The number of wrong tokens that are delayed at a time, which bounds the guesses per second.
const MOST_DELAYED: usize = 16;

/// A hash of a secret. Secrets are compared by their hashes, and in constant time: so neither their length nor the
/// correct part of a guess can be measured.
#[derive(Clone, Copy)]
pub(super) struct Secret([u8; 32]);

impl Secret {
    fn of(text: &[u8]) -> Self {
        Self(Sha256::digest(text).into())
    }

    fn is(self, other: Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

/// Reads the token. The file must be readable only by its owner.
pub(crate) fn read_token(path: &Path) -> Result<Secret, Failure> {
    let shown = path.display();
    let cannot = |error| Failure::usage(format!("the token file {shown} cannot be read: {error}"));
    let file = std::fs::File::open(path).map_err(cannot)?;
    let mode = file.metadata().map_err(cannot)?.mode();
    if mode & 0o077 != 0 {
        let problem = format!("others can read or write the token file {shown}");
        return Err(Failure::usage(format!("{problem}: run `chmod 600 {shown}`")));
    }
    let mut text = String::new();
    file.take(LONGEST_TOKEN).read_to_string(&mut text).map_err(cannot)?;
    let token = text.trim_end_matches(['\n', '\r']);
    if token.len() < SHORTEST_TOKEN {
        let problem = format!("the token in {shown} has {} characters", token.len());
        let advice = "`head -c 24 /dev/urandom | base64` makes a good one";
        return Err(Failure::usage(format!(
            "{problem}; at least {SHORTEST_TOKEN} are needed: {advice}"
        )));
    }
    if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        let problem = "contains a blank or a character that is not ASCII";
        return Err(Failure::usage(format!("the token in {shown} {problem}: use another")));
    }
    Ok(Secret::of(token.as_bytes()))
}

/// The rules, and the sessions.
pub(super) struct Access {
    token: Option<Secret>,
    /// Whether reading needs the token as well.
    private: bool,
    /// The values of `Host` that are answered, in lower case.
    hosts: Vec<String>,
    /// How many of them are addresses of this server. The others come from `--host`.
    addresses: usize,
    /// The name of the cookie. Browsers do not separate cookies by port, so two consoles on one host use different
    /// names.
    cookie: String,
    sessions: Mutex<HashMap<[u8; 32], Session>>,
    delayed: Semaphore,
}

struct Session {
    ends: Instant,
    /// The message for the next page.
    notice: Option<String>,
}

/// What a request may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Caller {
    Anonymous,
    /// The request belongs to a session.
    Session([u8; 32]),
    /// The request contains the token.
    Token,
}

impl Caller {
    pub(super) fn may_act(self) -> bool {
        self != Self::Anonymous
    }
}

impl Access {
    pub(super) fn new(
        token: Option<Secret>,
        private: bool,
        address: SocketAddr,
        names: &[String],
    ) -> Self {
        let port = address.port();
        let local_names = [
            "localhost".to_owned(),
            Ipv4Addr::LOCALHOST.to_string(),
            format!("[{}]", Ipv6Addr::LOCALHOST),
            match address {
                SocketAddr::V4(address) => address.ip().to_string(),
                SocketAddr::V6(address) => format!("[{}]", address.ip()),
            },
        ];
        let mut hosts: Vec<_> = local_names.iter().map(|name| format!("{name}:{port}")).collect();
        if port == 80 {
            hosts.extend(local_names);
        }
        let addresses = hosts.len();
        for name in names.iter().map(|name| name.to_ascii_lowercase()) {
            hosts.push(format!("{name}:{port}"));
            hosts.push(name);
        }
        let (sessions, delayed) = (Mutex::default(), Semaphore::new(MOST_DELAYED));
        let cookie = format!("leasehold-{port}");
        Self { token, private, hosts, addresses, cookie, sessions, delayed }
    }

    /// Whether there is a token, which allows actions.
    pub(super) fn has_token(&self) -> bool {
        self.token.is_some()
    }

    fn knows_host(&self, host: &str) -> bool {
        let host = host.to_ascii_lowercase();
        self.hosts.contains(&host)
    }

    fn sessions(&self) -> MutexGuard<'_, HashMap<[u8; 32], Session>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a session if the token is right. Returns its cookie.
    ///
    /// The cookie is not `Secure`: this server has no TLS, and cannot know whether a proxy in front of it has.
    pub(super) async fn log_in(&self, token: &str) -> Result<String, Refusal> {
        self.check(token).await?;
        let mut id = [0; 32];
        getrandom::fill(&mut id).map_err(|error| {
            let sentence = format!("The system's random number source failed: {error}.");
            Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, sentence)
        })?;
        let id = id.iter().fold(String::new(), |mut id, byte| {
            let _ = write!(id, "{byte:02x}");
            id
        });
        let mut sessions = self.sessions();
        let now = Instant::now();
        sessions.retain(|_, session| session.ends > now);
        if sessions.len() >= MOST_SESSIONS {
            let oldest = sessions.iter().min_by_key(|(_, session)| session.ends);
            if let Some(oldest) = oldest.map(|(key, _)| *key) {
                sessions.remove(&oldest);
            }
        }
        let session = Session { ends: now + SESSION, notice: None };
        sessions.insert(Secret::of(id.as_bytes()).0, session);
        let (name, seconds) = (&self.cookie, SESSION.as_secs());
        Ok(format!("{name}={id}; Path=/; HttpOnly; SameSite=Strict; Max-Age={seconds}"))
    }

    /// Ends a session. Returns the cookie that removes it from the browser.
    pub(super) fn log_out(&self, caller: Caller) -> String {
        if let Caller::Session(key) = caller {
            self.sessions().remove(&key);
        }
        format!("{}=; Path=/; HttpOnly; SameSite=Strict; Max-Age=0", self.cookie)
    }

    /// Sets the message for the next page of this caller.
    pub(super) fn leave_notice(&self, caller: Caller, notice: String) {
        if let Caller::Session(key) = caller
            && let Some(session) = self.sessions().get_mut(&key)
        {
            session.notice = Some(notice);
        }
    }

    pub(super) fn take_notice(&self, caller: Caller) -> Option<String> {
        let Caller::Session(key) = caller else { return None };
        self.sessions().get_mut(&key)?.notice.take()
    }

    /// Fails after a delay if the token is wrong. Other requests are not delayed.
    async fn check(&self, token: &str) -> Result<(), Refusal> {
        let Some(expected) = self.token else { return Err(no_token()) };
        if expected.is(Secret::of(token.as_bytes())) {
            return Ok(());
        }
        let Ok(_permit) = self.delayed.try_acquire() else {
            let sentence = "Too many wrong tokens. Try again in a moment.";
            return Err(Refusal::new(StatusCode::TOO_MANY_REQUESTS, sentence));
        };
        tokio::time::sleep(DELAY).await;
        Err(Refusal::new(StatusCode::UNAUTHORIZED, "The token is wrong."))
    }

    async fn caller(&self, headers: &HeaderMap) -> Result<Caller, Refusal> {
        if let Some(authorization) = headers.get(header::AUTHORIZATION) {
            let bearer = authorization.to_str().ok().and_then(|value| value.split_once(' '));
            let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
            let Some((_, token)) = bearer else {
                let sentence = "Only `Authorization: Bearer TOKEN` is understood.";
                return Err(Refusal::new(StatusCode::UNAUTHORIZED, sentence));
            };
            return self.check(token.trim()).await.map(|()| Caller::Token);
        }
        let cookies = headers.get_all(header::COOKIE).iter();
        let cookies = cookies.filter_map(|value| value.to_str().ok());
        let pairs = cookies.flat_map(|value| value.split(';'));
        let mut pairs = pairs.filter_map(|pair| pair.trim().split_once('='));
        let Some((_, id)) = pairs.find(|(name, _)| *name == self.cookie) else {
            return Ok(Caller::Anonymous);
        };
        // A lookup by the hash does not reveal which part of a guess is right.
        let key = Secret::of(id.as_bytes()).0;
        let is_valid =
            self.sessions().get(&key).is_some_and(|session| session.ends > Instant::now());
        Ok(if is_valid { Caller::Session(key) } else { Caller::Anonymous })
    }

    /// Checks the origin: a request that changes something must come from a page of this server, or from no page.
    ///
    /// A page on another port of the same host belongs to the same site, and its requests carry our cookies. Browsers
    /// that send `Sec-Fetch-Site` distinguish it. For other browsers the origin must be the host that the request
    /// names. A proxy may have replaced that with an address of this server, to which no browser sends the cookies of
    /// another name.
    fn check_origin(&self, headers: &HeaderMap, host: &str) -> Result<(), Refusal> {
        let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or_default());
        let site = text("sec-fetch-site").map(|site| site == "same-origin" || site == "none");
        let from_here = match (text("origin"), site) {
            (Some(origin), site) => {
                let origin_host =
                    origin.strip_prefix("http://").or(origin.strip_prefix("https://"));
                let named = |origin_host: &str| {
                    origin_host.eq_ignore_ascii_case(host)
                        || self.hosts[..self.addresses].contains(&host.to_ascii_lowercase())
                };
                origin_host.is_some_and(|origin_host| {
                    self.knows_host(origin_host) && site.unwrap_or_else(|| named(origin_host))
                })
            }
            (None, Some(site)) => site,
            // Without an origin it is not a browser, unless it sends a cookie.
            (None, None) => !headers.contains_key(header::COOKIE),
        };
        if from_here {
            return Ok(());
        }
        let sentence = "This request comes from another site, and is refused.";
        Err(Refusal::new(StatusCode::FORBIDDEN, sentence))
    }

    async fn admit(&self, request: &Parts) -> Result<Caller, Refusal> {
        let (headers, path) = (&request.headers, request.uri.path());
        // Supervisors often use an address. The answer contains nothing secret.
        if path == "/healthz" {
            return Ok(Caller::Anonymous);
        }
        let mut hosts = headers.get_all(header::HOST).iter();
        // With two `Host` headers, a proxy and this server might use different ones.
        let host = hosts.next().filter(|_| hosts.next().is_none());
        let host = host.and_then(|host| host.to_str().ok()).filter(|host| self.knows_host(host));
        let Some(host) = host else {
            let sentence = "This server does not answer to that host name. To allow it, start `leasehold serve` with \
                            --host NAME.";
            return Err(Refusal::new(StatusCode::MISDIRECTED_REQUEST, sentence));
        };
        if request.method != Method::GET && request.method != Method::HEAD {
            self.check_origin(headers, host)?;
        }
        let caller = self.caller(headers).await?;
        let public = matches!(path, "/login" | "/style.css" | "/script.js" | "/icon.svg");
        if self.private && !caller.may_act() && !public {
            let sentence =
                "The token is required: send `Authorization: Bearer TOKEN`, or log in at /login.";
            return Err(Refusal::new(StatusCode::UNAUTHORIZED, sentence));
        }
        Ok(caller)
    }
}

pub(super) fn no_token() -> Refusal {
    let sentence =
        "Actions are disabled. To enable them, start `leasehold serve` with --token-file FILE.";
    Refusal::new(StatusCode::FORBIDDEN, sentence)
}

/// Checks every request, and adds the headers to every answer.
pub(super) async fn guard(
    State(console): State<Arc<Console>>,
    request: Request,
    next: Next,
) -> Response {
    let (mut parts, body) = request.into_parts();
    let mut response = match console.access.admit(&parts).await {
        Ok(caller) => {
            parts.extensions.insert(caller);
            next.run(Request::from_parts(parts, body)).await
        }
        Err(refusal) => refused(&refusal, &parts),
    };
    reply::secure(&mut response);
    response
}

/// Redirects browsers to the login, and answers other clients with a message.
fn refused(refusal: &Refusal, request: &Parts) -> Response {
    let accepts = request.headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let browser = accepts.is_some_and(|accepts| accepts.contains("text/html"));
    let anonymous = !request.headers.contains_key(header::AUTHORIZATION);
    let wants_login = refusal.status == StatusCode::UNAUTHORIZED && anonymous;
    if wants_login && browser && request.method == Method::GET {
        return reply::see_other("/login");
    }
    let mut response = refusal.for_path(&request.uri);
    let headers = response.headers_mut();
    if refusal.status == StatusCode::UNAUTHORIZED {
        headers.insert(header::WWW_AUTHENTICATE, axum::http::HeaderValue::from_static("Bearer"));
    } else if refusal.status == StatusCode::TOO_MANY_REQUESTS {
        headers.insert(header::RETRY_AFTER, axum::http::HeaderValue::from_static("2"));
    }
    response
}
