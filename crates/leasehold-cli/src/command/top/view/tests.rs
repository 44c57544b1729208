use leasehold::{Client, Permit};

use super::*;

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(future)
}

async fn hold(client: &Client, name: &str) -> Permit {
    client.semaphore(name, 1).build().unwrap().acquire().await.unwrap()
}

async fn view(client: &Client) -> View {
    let mut view = View::new(Monitor::default());
    view.record(Monitor::read(client).await.0);
    view
}

fn press(view: &mut View, keys: &str) -> Effect {
    let mut effect = Effect::None;
    for c in keys.chars() {
        let code = match c {
            '\r' => KeyCode::Enter,
            '\t' => KeyCode::Tab,
            '\x1b' => KeyCode::Esc,
            c => KeyCode::Char(c),
        };
        effect = view.key(KeyEvent::from(code));
    }
    effect
}

fn control(view: &mut View, c: char) -> Effect {
    view.key(KeyEvent::new(KeyCode::Char(c), KeyModifiers::CONTROL))
}

#[test]
fn only_y_acts() {
    block_on(async {
        let client = Client::memory();
        let _held = hold(&client, "deploy").await;
        let mut view = view(&client).await;
        let questions = ["p\r", "pwhy\r", "d\r", "r", "l5\r", "l5\t\r"];
        for question in questions {
            assert_eq!(press(&mut view, question), Effect::None);
            assert!(matches!(view.dialog, Some(Dialog::Confirm { .. })), "{question:?}");
            assert_eq!(press(&mut view, "Yx\r \tprld"), Effect::None);
            assert!(view.dialog.is_some());
            assert_eq!(press(&mut view, "n"), Effect::None);
            assert!(view.dialog.is_none());
        }
        let acts = |action| Effect::Act { name: "deploy".to_owned(), action };
        assert_eq!(press(&mut view, "r"), Effect::None);
        assert_eq!(press(&mut view, "y"), acts(Action::Resume));
        let reason = Some("why not".to_owned());
        assert_eq!(press(&mut view, "pwhy not \ry"), acts(Action::Pause { reason }));
        assert_eq!(press(&mut view, "d\ry"), acts(Action::Drain { reason: None }));
        assert_eq!(press(&mut view, "l12\ry"), acts(Action::Limit { capacity: 12 }));
        assert_eq!(press(&mut view, "l12\t\ry"), acts(Action::Pin { capacity: 12 }));
        // No number, zero, too much, and nothing to unpin.
        for bad in ["l\ry", "l0\ry", "l9999999999\ry", "luy"] {
            assert_eq!(press(&mut view, bad), Effect::None);
            assert!(matches!(view.dialog, Some(Dialog::Limit { problem: None, .. })), "{bad:?}");
            press(&mut view, "\x1b");
        }
    });
}

#[test]
fn control_keys_work_in_every_dialog() {
    block_on(async {
        let client = Client::memory();
        let _held = hold(&client, "deploy").await;
        for keys in ["", "?", "p", "p\r", "l", "/", "\r"] {
            let mut view = view(&client).await;
            press(&mut view, keys);
            assert_eq!(control(&mut view, 'z'), Effect::Suspend);
            assert_eq!(control(&mut view, 'c'), Effect::Interrupt);
        }
        let mut view = view(&client).await;
        assert_eq!(press(&mut view, "/q"), Effect::None);
        assert_eq!(press(&mut view, "\x1bq"), Effect::Quit);
        // Control characters do not get into text.
        press(&mut view, "p");
        control(&mut view, 'g');
        view.key(KeyEvent::from(KeyCode::Char('\u{7}')));
        assert!(matches!(&view.dialog, Some(Dialog::Reason { text, .. }) if text.is_empty()));
    });
}

#[test]
fn the_selection_stays_with_its_name() {
    block_on(async {
        let client = Client::memory();
        let _b = hold(&client, "b").await;
        let _d = hold(&client, "d").await;
        let mut view = view(&client).await;
        press(&mut view, "j");
        assert_eq!(view.subject(), Some((Kind::Semaphore, "d".to_owned())));
        let _others = (hold(&client, "a").await, hold(&client, "c").await);
        view.record(Monitor::read(&client).await.0);
        assert_eq!((view.at, view.subject()), (3, Some((Kind::Semaphore, "d".to_owned()))));
        press(&mut view, "jjj");
        assert_eq!(view.at, 3);
        // Nothing is selected where there is nothing.
        press(&mut view, "/none\r");
        assert_eq!((view.rows.len(), view.subject()), (0, None));
        assert_eq!(press(&mut view, "\rprldx\t\t\t"), Effect::None);
        assert_eq!(view.dialog, None);
    });
}

#[test]
fn an_outage_keeps_the_last_snapshot() {
    block_on(async {
        let client = Client::memory();
        let _held = hold(&client, "deploy").await;
        let mut view = view(&client).await;
        assert_eq!(press(&mut view, "\r"), Effect::Fetch);
        let (read, _) = Detail::fetch(&client, Kind::Semaphore, "deploy").await;
        view.record_detail(Kind::Semaphore, "deploy", read);
        let failed = client.semaphore("", 1).build().map(|_| ()).unwrap_err();
        view.record_detail(Kind::Semaphore, "deploy", Err(failed));
        let open = view.open.as_ref().unwrap();
        assert!(open.problem.is_some() && open.detail.is_some());
        // An answer about another name changes nothing.
        view.record_detail(Kind::Lock, "deploy", Ok(None));
        view.record_detail(Kind::Semaphore, "other", Ok(None));
        assert!(view.open.as_ref().unwrap().detail.is_some());
        press(&mut view, "xy");
        view.record_detail(Kind::Semaphore, "deploy", Ok(None));
        assert!(view.open.as_ref().unwrap().problem.is_none());
    });
}
