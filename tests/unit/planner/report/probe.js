// uses the drawn page and writes what it saw into <pre id=probe>
addEventListener("load",()=>{
const all=s=>document.querySelectorAll(s).length, at=s=>document.querySelector(s);
const out={faults,ready:document.documentElement.dataset.ready||"",drawn_ms:performance.now(),
mem:all(".mem"),fall:all(".fall"),op:all(".op"),node:all(".node-op"),gpu:all(".gpus span"),
traffic:all(".traffic"),rows:all("#alternatives tr"),untold:[...document.querySelectorAll(
".mem,.fall,.op,.traffic,.node-op,#facts dd")].filter(e=>!/source: ./.test(e.dataset.tip)).length,
overflow:document.documentElement.scrollWidth-innerWidth,width:innerWidth};
const cv=at("#canvas"), px=cv.getContext("2d").getImageData(0,0,cv.width,cv.height).data;
const seen=new Set(); for(let i=0;i<px.length;i+=4*97) seen.add(px[i]+","+px[i+1]+","+px[i+2]);
out.colours=seen.size; const before=cv.dataset.view; at("#zoomin").click(); out.zoomed=cv.dataset.view!==before;
cv.dispatchEvent(new WheelEvent("wheel",{deltaY:-100,cancelable:true})); out.wheel=cv.dataset.view;
at("#whole").click(); out.whole=cv.dataset.view===before;
const dark=getComputedStyle(document.body).backgroundColor; at("#theme").click();
out.themes=[dark,getComputedStyle(document.body).backgroundColor];
const rank=at(".gpus span"); rank.click(); out.group=all(".gpus span.on");
const m=at(".mem"); if(m){m.focus();out.tip=at("#tip").textContent;}
const pre=document.createElement("pre"); pre.id="probe"; pre.textContent=JSON.stringify(out);
document.body.append(pre);});
