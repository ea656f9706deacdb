// Starts the page.

import { keyFrom, storeKey, storedKey } from "./api.js";
import { by } from "./dom.js";
import { startLive } from "./live.js";
import { showProof } from "./proven.js";
import { served, startTry } from "./try.js";

const field = by("api-key");
field.value = storedKey();
field.addEventListener("input", () => storeKey(field.value.trim()));
by("key-form").addEventListener("submit", (event) => event.preventDefault());
keyFrom(() => field.value.trim());
startTry();
startLive({ onModel: served, onSelftest: showProof });
