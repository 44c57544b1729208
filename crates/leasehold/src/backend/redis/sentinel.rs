//! Sentinels, which know which server is the primary.
//!
//! Before every connection the client asks all known sentinels at once. A sentinel may be behind the others, or cut off
//! from them together with an old primary that still reports `role:master`. Sentinels number their configurations. So
//! the client waits a moment for the others, and believes the newest configuration. The server that it names must also
//! report that it is the primary.
//!
//! Once connected, the client listens to all known sentinels. When one of them announces another primary, the client
//! drops its connection at once, even if the old primary still answers. A sentinel that hangs, or that is cut off
//! together with the old primary, does not matter while another one announces. A sentinel whose configuration is older
//! than the one that the client has connected by is ignored.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::RedisSettings;
use super::command::RedisCommand;
use super::connect::{AbortOnDrop, Identity, OpenSocket};
use super::connection::Connection;
use super::errors::{RedisError, translate, within};
use super::socket::WakeUp;
use super::value::{PushKind, Value};
use crate::callbacks::event;
use crate::url::{SentinelSettings, ServerSettings};
use crate::{ClientId, Error};

/// The channel on which sentinels announce another primary.
const SWITCHES: &str = "+switch-master";

/// How long the client keeps one connection to a sentinel, because it may be half open; and how long it waits before it
/// opens the next one.
const LISTEN_FOR: Duration = Duration::from_secs(60);
const LISTEN_AGAIN: Duration = Duration::from_millis(500);

/// How long the client refuses to follow an older configuration than the newest that it has seen. It must end, because
/// operators may set up new sentinels, which count from 0 again.
const REFUSE_OLDER_FOR: Duration = Duration::from_secs(60);

/// How long the client waits for the other sentinels after the first answer.
const OTHERS_WITHIN: Duration = Duration::from_millis(100);

/// A host and a port.
type Address = (String, u16);

/// A primary that a sentinel names.
#[derive(Clone, Debug)]
struct Announcement {
    primary: Address,
    /// The number of the sentinel's configuration, if it is known.
    epoch: Option<u64>,
}

/// Receives the last primary that was announced.
pub(super) struct Announced {
    receiver: watch::Receiver<Option<Announcement>>,
    /// The configuration by which the client has connected.
    epoch: u64,
}

pub(super) struct Sentinels {
    settings: Arc<RedisSettings>,
    named: SentinelSettings,
    /// All known sentinels. The one that answered last comes first.
    known: Mutex<Vec<ServerSettings>>,
    /// Notified when `known` may have changed.
    changed: Notify,
    /// The last primary that was announced.
    announced: watch::Sender<Option<Announcement>>,
    /// The number of the newest configuration, and when a sentinel last named it.
    newest: Mutex<(u64, Instant)>,
}

impl Sentinels {
    pub(super) fn new(settings: Arc<RedisSettings>, named: SentinelSettings) -> Arc<Self> {
        let (known, announced) = (Mutex::new(named.sentinels.clone()), watch::Sender::new(None));
        let newest = Mutex::new((0, Instant::now()));
        Arc::new(Self { settings, named, known, changed: Notify::new(), announced, newest })
    }

    /// Connects to the primary that the sentinels name.
    pub(super) async fn connect(
        self: &Arc<Self>,
        connection: &Connection,
        client: ClientId,
        before: Option<&Identity>,
    ) -> Result<OpenSocket, Error> {
        // Subscribe first, so that no announcement is missed meanwhile.
        let receiver = self.announced.subscribe();
        // A server that a sentinel names may be unreachable.
        let limit = self.settings.connect_timeout / 2;
        let mut asked = JoinSet::new();
        for sentinel in self.known().iter().cloned() {
            let this = self.clone();
            asked.spawn(async move {
                let answer = this.query(&sentinel).await;
                (sentinel, answer)
            });
        }
        let mut newest = Newest { epoch: self.newest_epoch(), ..Newest::default() };
        let (mut others_until, mut problem) = (None, None);
        // A temporary error is the one to report, because a retry may succeed.
        let mut failed = |error: Error| {
            if problem.is_none() || error.is_transient() {
                problem = Some(error);
            }
        };
        loop {
            let answer = match others_until.filter(|_| !newest.untried.is_empty()) {
                None => asked.join_next().await,
                Some(until) => {
                    tokio::time::timeout_at(until, asked.join_next()).await.unwrap_or(None)
                }
            };
            match answer {
                Some(Ok((sentinel, Ok(view)))) => {
                    self.learn(&sentinel, &view.others);
                    if !newest.add(view) {
                        let what = sentinel.to_string();
                        let what = format!("the sentinel {what} names an outdated primary");
                        failed(Error::unavailable(what, false, None));
                    }
                    others_until.get_or_insert_with(|| Instant::now() + OTHERS_WITHIN);
                    continue;
                }
                Some(Ok((_, Err(error)))) => {
                    failed(error);
                    continue;
                }
                Some(Err(_)) => continue,
                None => {}
            }
            let Some(address) = newest.untried.pop() else { break };
            event!(debug, host = address.0, port = address.1, "a sentinel named this primary");
            let info = self.named.server.at(&address.0, address.1);
            let what = format!("connecting to {info}");
            let connected = connection.connect_to(&info, client, before);
            match within(limit, &what, connected).await {
                Ok(mut socket) => {
                    socket.announced = Some(Announced { receiver, epoch: newest.epoch });
                    return Ok(socket);
                }
                Err(error) => failed(error),
            }
        }
        Err(problem.unwrap_or_else(|| Error::internal("the list of sentinels is empty")))
    }

    /// Resolves when a sentinel announces a primary.
    pub(super) async fn announcement(&self) {
        let _ = self.announced.subscribe().changed().await;
    }

    /// Listens to all known sentinels.
    pub(super) async fn listen(self: Arc<Self>) {
        let mut listeners: HashMap<Address, AbortOnDrop> = HashMap::new();
        loop {
            let known = self.known().clone();
            listeners.retain(|address, _| {
                known.iter().any(|sentinel| sentinel.host_and_port() == *address)
            });
            for sentinel in known {
                listeners
                    .entry(sentinel.host_and_port())
                    .or_insert_with(|| AbortOnDrop(tokio::spawn(self.clone().listen_to(sentinel))));
            }
            self.changed.notified().await;
        }
    }

    /// Listens to one sentinel, over one connection after the other.
    async fn listen_to(self: Arc<Self>, sentinel: ServerSettings) {
        let timeout = self.settings.connect_timeout;
        loop {
            let opened = tokio::time::timeout(timeout, self.subscribe(&sentinel)).await;
            if let Ok(Some(mut socket)) = opened {
                let following = self.follow(&sentinel, &mut socket);
                let _ = tokio::time::timeout(LISTEN_FOR, following).await;
            }
            tokio::time::sleep(LISTEN_AGAIN).await;
        }
    }

    /// Connects to a sentinel, and returns a connection that receives its announcements.
    async fn subscribe(&self, sentinel: &ServerSettings) -> Option<OpenSocket> {
        let subscribe = [RedisCommand::new("SUBSCRIBE").arg(SWITCHES)];
        let opened = OpenSocket::open(&self.settings, sentinel, &subscribe).await;
        let (socket, mut subscribed) = opened.ok()?;
        subscribed.pop()?.checked().ok()?;
        // Announcements made before the subscription were missed, so ask.
        let View { primary, epoch, .. } = self.query(sentinel).await.ok()?;
        self.announced.send_replace(Some(Announcement { primary, epoch }));
        Some(socket)
    }

    /// Asks a sentinel, and records how new its configuration is.
    async fn query(&self, sentinel: &ServerSettings) -> Result<View, Error> {
        let what = format!("request to the sentinel {sentinel}");
        let failed = |error: RedisError| {
            let text = error.to_string();
            if text.starts_with("ERR unknown command") && !text.contains("HELLO") {
                let problem = "the server is not a sentinel: use redis:// for a single server";
                return Error::Unusable { problem: format!("{what}: {problem}") };
            }
            if text.starts_with("ERR No such master") {
                return unknown(&what, &self.named.service);
            }
            translate(&what, &error)
        };
        let queries = ["GET-MASTER-ADDR-BY-NAME", "SENTINELS", "MASTER"]
            .map(|word| RedisCommand::new("SENTINEL").arg(word).arg(&self.named.service));
        let opened = OpenSocket::open(&self.settings, sentinel, &queries).await;
        let mut answers = opened.map_err(failed)?.1.into_iter();
        let mut next = || answers.next().unwrap_or_default().checked();
        let primary: Option<Address> = next()
            .map_err(|error| failed(error.into()))?
            .read()
            .map_err(|error| Error::internal(format!("{what}: {error}")))?;
        let primary = primary.ok_or_else(|| unknown(&what, &self.named.service))?;
        let others = next().map(sentinels).unwrap_or_default();
        // ACL rules may forbid this command; then the epoch is unknown.
        let described: HashMap<String, String> =
            next().ok().and_then(|answer| answer.read().ok()).unwrap_or_default();
        let epoch = described.get("config-epoch").and_then(|epoch| epoch.parse().ok());
        let view = View { primary, epoch, others };
        self.note(&view);
        Ok(view)
    }

    fn note(&self, view: &View) {
        let newest = self.newest_epoch();
        if let Some(epoch) = view.epoch.filter(|epoch| *epoch >= newest) {
            *self.newest.lock().unwrap_or_else(PoisonError::into_inner) = (epoch, Instant::now());
        }
    }

    /// Returns the number of the newest known configuration, or 0 after [`REFUSE_OLDER_FOR`]. The client follows no
    /// older one.
    fn newest_epoch(&self) -> u64 {
        let newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if newest.1.elapsed() < REFUSE_OLDER_FOR { newest.0 } else { 0 }
    }

    async fn follow(&self, sentinel: &ServerSettings, socket: &mut OpenSocket) {
        while let Some(WakeUp { push, .. }) = socket.wake_ups.recv().await {
            if push.kind != PushKind::Message {
                continue;
            }
            let Some((host, port)) = switch(&push.data, &self.named.service) else { continue };
            event!(debug, host, port, "a sentinel announced another primary");
            // The message has no epoch. A sentinel that catches up announces switches of the past.
            let asked = tokio::time::timeout(self.settings.connect_timeout, self.query(sentinel));
            let announcement = match asked.await {
                Ok(Ok(View { primary, epoch, .. })) => Announcement { primary, epoch },
                _ => Announcement { primary: (host, port), epoch: None },
            };
            self.announced.send_replace(Some(announcement));
        }
    }

    /// Records the sentinel that answered and the others that it named. Sentinels learnt earlier are dropped, because
    /// sentinels come and go; those in the URL stay.
    fn learn(&self, answered: &ServerSettings, others: &[Address]) {
        let others = others.iter().map(|(host, port)| answered.at(host, *port));
        let all = [answered.clone()].into_iter().chain(others);
        let mut addresses = HashSet::new();
        let is_new = |sentinel: &ServerSettings| addresses.insert(sentinel.host_and_port());
        let all = all.chain(self.named.sentinels.iter().cloned());
        *self.known() = all.filter(is_new).collect();
        self.changed.notify_one();
    }

    fn known(&self) -> MutexGuard<'_, Vec<ServerSettings>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one sentinel knows.
struct View {
    primary: Address,
    /// The number of its configuration, if the sentinel returns it.
    epoch: Option<u64>,
    /// The other sentinels.
    others: Vec<Address>,
}

/// The primaries of the newest configuration. There is one, unless sentinels do not return its number.
#[derive(Default)]
struct Newest {
    epoch: u64,
    named: HashSet<Address>,
    untried: Vec<Address>,
}

impl Newest {
    /// Returns false if a newer configuration is known. A configuration without a number counts as new.
    fn add(&mut self, View { primary, epoch, .. }: View) -> bool {
        let epoch = epoch.unwrap_or(self.epoch);
        if epoch > self.epoch {
            *self = Self { epoch, ..Self::default() };
        }
        if epoch == self.epoch && self.named.insert(primary.clone()) {
            self.untried.push(primary);
        }
        epoch == self.epoch
    }
}

/// Resolves when a sentinel announces a primary other than this one, by a configuration that is not older than the one
/// by which the client has connected.
pub(super) async fn moved_from(connected: &ServerSettings, announced: Option<Announced>) {
    let Some(Announced { mut receiver, epoch }) = announced else {
        return std::future::pending().await;
    };
    let connected = connected.host_and_port();
    let is_elsewhere = |to: &Announcement| {
        to.primary != connected && to.epoch.is_none_or(|announced| announced >= epoch)
    };
    // Earlier announcements may be outdated.
    while receiver.changed().await.is_ok() {
        if receiver.borrow_and_update().as_ref().is_some_and(is_elsewhere) {
            return;
        }
    }
    std::future::pending::<()>().await;
}

fn unknown(what: &str, service: &str) -> Error {
    let problem =
        format!("the sentinel knows no primary {service:?}: use the name from its configuration");
    Error::Unusable { problem: format!("{what}: {problem}") }
}

/// Reads the addresses from the answer to `SENTINEL SENTINELS`.
fn sentinels(answer: Value) -> Vec<Address> {
    let described: Vec<HashMap<String, String>> = answer.read().unwrap_or_default();
    let address = |sentinel: &HashMap<String, String>| {
        Some((sentinel.get("ip")?.clone(), sentinel.get("port")?.parse().ok()?))
    };
    described.iter().filter_map(address).collect()
}

/// Reads the new primary from an announcement: "name old-host old-port new-host new-port".
fn switch(data: &[Value], service: &str) -> Option<Address> {
    let [_, Value::Text(text)] = data else { return None };
    let text = std::str::from_utf8(text).ok()?;
    let [name, _, _, host, port] = text.split(' ').collect::<Vec<_>>()[..] else { return None };
    (name == service).then_some((host.to_owned(), port.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announcement_names_the_new_primary() {
        let data =
            |text: &str| [Value::Text(SWITCHES.into()), Value::Text(text.as_bytes().to_vec())];
        let announced = data("mymaster 127.0.0.1 6379 127.0.0.1 6380");
        assert_eq!(switch(&announced, "mymaster"), Some(("127.0.0.1".to_owned(), 6380)));
        assert_eq!(switch(&announced, "other"), None);
        assert_eq!(switch(&data("mymaster"), "mymaster"), None);
    }
}
